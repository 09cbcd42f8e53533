"""The framed pipe between the C++ side and a helper: u32 little-endian length, then that many bytes.

A helper takes its standard input and output for the frames and gives user code others in exchange:
reading finds an empty file, printing goes to standard error. So a `print` in a template, a reward or
a library can never break the frames. Requests and replies are JSON; integers of any size stay exact.
The loop ends with status 0 when the pipe closes between two frames and with an error inside one.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import Any, BinaryIO, Callable

MAX_FRAME_BYTES = 1 << 30


def take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Returns (reader, writer) on the original stdin and stdout, and redirects both for everyone else."""
    reader = os.fdopen(os.dup(0), "rb")
    writer = os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return reader, writer


def _read_exactly(reader: BinaryIO, size: int) -> bytes:
    data = reader.read(size)
    while len(data) < size:
        more = reader.read(size - len(data))
        if not more:
            break
        data += more
    return data


def read_frame(reader: BinaryIO) -> bytes | None:
    """The next payload, or None when the pipe was closed between two frames."""
    head = _read_exactly(reader, 4)
    if not head:
        return None
    if len(head) < 4:
        raise EOFError("pipe: closed inside a frame's length")
    (size,) = struct.unpack("<I", head)
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"pipe: a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    payload = _read_exactly(reader, size)
    if len(payload) < size:
        raise EOFError(f"pipe: closed after {len(payload)} of a frame's {size} bytes")
    return payload


def write_frame(writer: BinaryIO, payload: bytes) -> None:
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"pipe: a frame of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    writer.write(struct.pack("<I", len(payload)))
    writer.write(payload)
    writer.flush()


def error_text(error: BaseException) -> str:
    """One line for a reply: the exception's type and message, safe to encode as UTF-8."""
    text = f"{type(error).__name__}: {error}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def row_results(answer_row: Callable[[Any], dict], rows: list) -> list[dict]:
    """Answers each row by itself; what a row raises (a panic of a native library too) is its error."""
    results = []
    for row in rows:
        try:
            results.append(answer_row(row))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # native panics are not Exception
            results.append({"error": error_text(error)})
    return results


def serve(answer: Callable[[dict], dict]) -> None:
    """Answers requests until the pipe closes. What `answer` raises is sent as {"error": text}."""
    reader, writer = take_standard_streams()
    while (payload := read_frame(reader)) is not None:
        try:
            reply = answer(json.loads(payload))
            encoded = json.dumps(reply, ensure_ascii=False).encode("utf-8")
        except Exception as error:
            encoded = json.dumps({"error": error_text(error)}, ensure_ascii=False).encode("utf-8")
        write_frame(writer, encoded)
