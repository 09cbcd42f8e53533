"""HTTP/1.1 calls from the helpers: connections are kept by each thread and used again, so a thousand
small calls do not open a thousand sockets. Blocking; asynchronous callers use `in_thread`.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

MAX_CONNECTIONS = 256
_executor = ThreadPoolExecutor(MAX_CONNECTIONS)
_local = threading.local()

# A kept connection that the server has closed meanwhile shows in one of these ways.
_GONE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
FAULTS = (OSError, http.client.HTTPException)


async def in_thread(function: Callable, *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_executor, function, *arguments)


def _kept() -> dict:
    if not hasattr(_local, "connections"):
        _local.connections = {}
    return _local.connections


def post(url: str, body: bytes, headers: dict, deadline: float) -> tuple[int, bytes]:
    """Status and body of the reply; `deadline` in time.monotonic()'s seconds. Raises one of FAULTS."""
    parts = urllib.parse.urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    place = (parts.scheme, parts.hostname, parts.port)
    while True:
        timeout = deadline - time.monotonic()
        if timeout <= 0:
            raise TimeoutError("no time left")
        connection = _kept().pop(place, None)
        used_before = connection is not None
        if connection is None:
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            connection = kind(parts.hostname, parts.port, timeout=timeout)
        elif connection.sock is not None:
            connection.sock.settimeout(timeout)
        try:
            connection.request("POST", target, body, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            content = response.read()
        except FAULTS as error:
            connection.close()
            if used_before and isinstance(error, _GONE):
                continue
            raise
        if not response.will_close:
            _kept()[place] = connection
        return response.status, content
