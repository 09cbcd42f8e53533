"""--rm-type remote_rm: a reward server over HTTP. Each answer is one POST to --rm-url of
{"prompt", "response", "label"}, as Miles sends it; the body of the reply is the reward in JSON.
A lost connection, a time-out, 408, 429 and 5xx are tried again with growing pauses, anything else is
the sample's error at once.
"""

from __future__ import annotations

import json
import time
from typing import Any

from tandem import http_calls

ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.25
RETRIED = {408, 429, 500, 502, 503, 504}


class RemoteError(Exception):
    """What the server said, in one line."""


def post_json(url: str, payload: dict, seconds: float) -> Any:
    """The parsed reply; `seconds` bound all attempts together."""
    deadline = time.monotonic() + seconds
    body = json.dumps(payload, ensure_ascii=False).encode("utf-8", "replace")
    fault = "no attempt was made"
    for attempt in range(ATTEMPTS):
        if attempt > 0:
            time.sleep(min(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), max(deadline - time.monotonic(), 0)))
        try:
            status, text = http_calls.post(url, body, {}, deadline)
        except http_calls.FAULTS as error:
            fault = f"{type(error).__name__}: {error}"
            if time.monotonic() >= deadline:
                raise RemoteError(f"{url}: no reply within {seconds:g} s ({fault})") from error
            continue
        if status == 200:
            try:
                return json.loads(text)
            except ValueError as error:
                raise RemoteError(f"{url}: the reply is not JSON: {text[:80]!r}") from error
        fault = f"status {status}: {text[:200].decode('utf-8', 'replace')}"
        if status not in RETRIED:
            break
    raise RemoteError(f"{url}: {fault}")


async def remote_rm(args, sample) -> Any:
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await http_calls.in_thread(post_json, args.rm_url, payload, args.reward_timeout_seconds)
