"""How a generate function talks to the engine: `post` in Miles's signature, and the small functions
around it. Calls carry the run's token and the key of the sample's random numbers, so that the tokens
of a sample depend on nothing but the seed, its id and the number of the call: the same run gives the
same answers, whatever else is generated beside it. Tokens go in and come out as ids; nothing is ever
tokenised again.
"""

from __future__ import annotations

import contextvars
import json
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

from tandem import http_calls, samples

TURN_SHIFT = 48  # calls of one sample draw from key spaces of their own


@dataclass
class Engines:
    """Where the run's engines are, and what every call carries."""

    addresses: list[str]  # "host:port"
    token: str
    seed: int
    timeout_seconds: float
    tokenizer: Any = None


@dataclass
class Turns:
    """The calls of one sample so far."""

    sample_id: int
    group: int
    evaluation: bool
    calls: int = 0
    versions: list[int] = field(default_factory=list)


engines: Engines | None = None
current: contextvars.ContextVar[Turns | None] = contextvars.ContextVar("turns", default=None)


class EngineError(Exception):
    """What the engine answered in place of tokens."""


def _is_engine(url: str) -> bool:
    return engines is not None and urllib.parse.urlsplit(url).netloc in engines.addresses


def _complete(payload: dict, turns: Turns) -> dict:
    params = {"sampling_seed": engines.seed, **(payload.get("sampling_params") or {})}
    if params.get("n", 1) != 1:
        raise EngineError(f"sampling_params: n is {params['n']}; ask for several answers by several calls of post, "
                          "each of which draws random numbers of its own")
    sample_id = turns.sample_id + (turns.calls << TURN_SHIFT)
    turns.calls += 1
    return {"sample_id": sample_id, "evaluation": turns.evaluation, "return_logprob": True,
            **payload, "sampling_params": params}


def _with_text(answer: dict) -> dict:
    """The engine has no tokenizer: the text of its ids is made here."""
    if not answer.get("text"):
        ids = answer.get("output_ids") or [item[1] for item in answer["meta_info"]["output_token_logprobs"]]
        answer["text"] = engines.tokenizer.decode(ids)
    return answer


def _send(url: str, payload: dict, headers: dict, timeout: float) -> Any:
    status, text = http_calls.post(url, json.dumps(payload).encode(), headers, time.monotonic() + timeout)
    if status != 200:
        raise EngineError(f"{url}: status {status}: {text[:300].decode('utf-8', 'replace')}")
    return json.loads(text)


async def post(url: str, payload: dict, max_retries: int = 60, action: str = "post", headers: dict | None = None) -> Any:
    """POST of JSON; the parsed reply. To an engine it adds the token, the sample's key and the text."""
    turns = current.get()
    if not _is_engine(url) or turns is None:
        timeout = engines.timeout_seconds if engines else 600.0
        return await http_calls.in_thread(_send, url, payload, headers or {}, timeout)
    parts = urllib.parse.urlsplit(url)
    address = engines.addresses[turns.group % len(engines.addresses)]
    target = urllib.parse.urlunsplit(("http", address, parts.path, parts.query, ""))
    headers = {**(headers or {}), "Authorization": f"Bearer {engines.token}"}
    if parts.path != "/generate":
        return await http_calls.in_thread(_send, target, payload, headers, engines.timeout_seconds)
    answer = await http_calls.in_thread(_send, target, _complete(payload, turns), headers, engines.timeout_seconds)
    for item in answer if isinstance(answer, list) else [answer]:
        _with_text(item)
        # An answer that an update met carries the version of each span: the first is the oldest.
        spans = item["meta_info"].get("weight_versions")
        turns.versions.append(int(spans[0]["version"] if spans else item["meta_info"]["weight_version"]))
    return answer


def compute_prompt_ids_from_sample(state, sample: samples.Sample, tools=None) -> list[int]:
    if sample.tokens:  # the driver has made them
        return list(sample.tokens[: len(sample.tokens) - sample.response_length])
    prompt = sample.prompt
    if not isinstance(prompt, str):
        prompt = state.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, tools=tools)
    return state.tokenizer.encode(prompt, add_special_tokens=False)


def compute_request_payload(args, input_ids: list[int], sampling_params: dict, multimodal_inputs=None):
    """(payload, None), or (None, TRUNCATED) when no token is left to the context's limit."""
    params = dict(sampling_params)
    most = params.pop("max_new_tokens", args.rollout_max_response_len)
    if args.rollout_max_context_len:
        most = min(most, args.rollout_max_context_len - len(input_ids))
    if most <= 0:
        return None, samples.Sample.Status.TRUNCATED
    return {"input_ids": input_ids, "sampling_params": {**params, "max_new_tokens": most},
            "return_logprob": True}, None


async def update_sample_from_response(args, sample, payload: dict, output: dict, update_loss_mask: bool = False) -> None:
    """Appends an answer's tokens, log-probabilities and text to the sample."""
    if not sample.response and not sample.tokens:
        sample.tokens = list(payload["input_ids"])
    items = output["meta_info"].get("output_token_logprobs") or []
    sample.tokens = sample.tokens + [item[1] for item in items]
    sample.response_length += len(items)
    sample.response += output["text"]
    sample.rollout_log_probs = (sample.rollout_log_probs or []) + [item[0] for item in items]
    if update_loss_mask:
        sample.loss_mask = (sample.loss_mask or []) + [1] * len(items)
    sample.update_from_meta_info(args, output["meta_info"])
