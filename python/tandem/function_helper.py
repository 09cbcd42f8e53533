"""Users' Python functions (rewards, generation, filters) in a process of their own, called over the
framed pipe.

    python -m tandem.function_helper [--memory-limit-mb N]

The first request loads, every later one calls:
    {"call": "load", "kind", "path": "module.function", "arguments": {flag: value}, "timeout",
     "batch": bool, ...}                        -> {"is_async": bool} or {"error": text}
    {"call": "run", "id", "samples": [...], ...} -> {"id", "value"} or {"id", "error": text}
A synchronous function runs one call at a time, in the order of arrival. Calls of an asynchronous one
run side by side, each under its time-out, and answer in the order in which they end. What a function
raises is that call's error and nothing else's: the process goes on. A call that never returns, a
crash or memory above the limit ends the process; who started it knows which calls were open. A frame
{"notice": text} between replies is for the user's eyes.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import math
import operator
import resource
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Callable

from tandem import pipe, samples


LARGEST_REWARD = 1e150  # beyond, the squares of a group's spread are not finite
TICK_SECONDS = 0.1
BLOCKED_SECONDS = 2.0  # of one block that is told



def load_function(path: str) -> Callable:
    """module.function, the working folder's modules first."""
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise ValueError(f"'{path}' is not of the form module.function")
    module = importlib.import_module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        raise AttributeError(f"module '{module_name}' ({module.__file__}) has no function '{name}'")
    return function


def fault_text(error: BaseException) -> str:
    """Type, message and the place in the user's code (the innermost frames), in one line."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    places = ", ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
    text = pipe.error_text(error)
    return f"{text} ({places})" if places else text


def plain_reward(value: Any, reward_key: str | None) -> float:
    """The number that a function returned; ValueError says what else it was."""
    if isinstance(value, dict):
        if not reward_key:
            raise ValueError(f"the reward is an object with the keys {sorted(map(str, value))}; name one with --reward-key")
        if reward_key not in value:
            raise ValueError(f"the reward has no key '{reward_key}', only {sorted(map(str, value))}")
        value = value[reward_key]
    if value is None:
        raise ValueError("the reward is None")
    if isinstance(value, (str, bytes, list, tuple)):
        raise ValueError(f"the reward is a {type(value).__name__} ({str(value)[:60]!r}), not a number")
    number = float(value)
    if not math.isfinite(number) or abs(number) > LARGEST_REWARD:
        raise ValueError(f"the reward is {number}, wanted a number within ±{LARGEST_REWARD:g}")
    return number


def reward_parts(value: Any) -> dict[str, float]:
    """The numbers of a reward that is an object."""
    if not isinstance(value, dict):
        return {}
    numbers = {str(k): float(v) for k, v in value.items() if isinstance(v, (bool, int, float))}
    return {k: v for k, v in numbers.items() if math.isfinite(v)}


class Rewards:
    """--custom-rm-path: f(args, sample) -> reward, or with --group-rm f(args, samples) -> rewards."""

    def __init__(self, request: dict, args: argparse.Namespace):
        samples.install_names()
        self._args = args
        self._batch = request.get("batch", False)
        self.function = load_function(request["path"])

    def call(self, request: dict) -> Any:
        group = [samples.Sample.from_dict(values) for values in request["samples"]]
        return self.function(self._args, group if self._batch else group[0])

    def value(self, request: dict, result: Any) -> list:
        count = len(request["samples"])
        if self._batch:
            results = list(result) if result is not None else []
            if len(results) != count:
                raise ValueError(f"{len(results)} rewards for {count} samples")
        else:
            results = [result]
        return [self._one(item) for item in results]

    def _one(self, result: Any) -> dict:
        # Each reward of a group is judged by itself; what else an object holds goes along.
        try:
            return {"reward": plain_reward(result, getattr(self._args, "reward_key", None)), "parts": reward_parts(result)}
        except (TypeError, ValueError) as error:
            return {"error": str(error)}


class Filter:
    """--dynamic-sampling-filter-path: f(args, samples) -> bool or DynamicFilterOutput, of a group."""

    def __init__(self, request: dict, args: argparse.Namespace):
        samples.install_names()
        self._args = args
        self.function = load_function(request["path"])

    def call(self, request: dict) -> Any:
        return self.function(self._args, [samples.Sample.from_dict(values) for values in request["samples"]])

    def value(self, request: dict, result: Any) -> dict:
        keep = getattr(result, "keep", result)
        if keep not in (True, False) or isinstance(keep, float):
            raise ValueError(f"a {type(result).__name__} ({str(result)[:60]!r}) was returned, wanted a bool or a DynamicFilterOutput")
        return {"keep": bool(keep), "reason": str(getattr(result, "reason", None) or "")}


class Tokenizer:
    """What generate functions use of a transformers tokenizer, over the folder's tokenizer.json."""

    def __init__(self, folder: str, chat_template: str):
        from tandem.tokenizer_helper import TokenizerService

        self._service = TokenizerService(Path(folder), Path(chat_template) if chat_template else None)

    def _row(self, request: dict) -> dict:
        row = self._service.answer(request)["rows"][0]
        if "error" in row:
            raise ValueError(row["error"])
        return row

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._row({"call": "encode", "texts": [text], "add_special_tokens": add_special_tokens})["ids"]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._row({"call": "decode", "ids": [list(ids)], "skip_special_tokens": skip_special_tokens})["text"]

    def apply_chat_template(self, messages: list, tokenize: bool = True, add_generation_prompt: bool = False,
                            tools: list | None = None, **kwargs) -> Any:
        row = self._row({"call": "template", "rows": [{"messages": messages, "tools": tools}], "kwargs": kwargs,
                         "add_generation_prompt": add_generation_prompt})
        return row["ids"] if tokenize else row["text"]


class State:
    """The `state` of Miles's generate functions: settings and tokenizer."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer):
        self.args, self.tokenizer, self.processor = args, tokenizer, None


def vocabulary_size(folder: str) -> int | None:
    """Of the model's config.json; None if it does not say."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")


def mask_value(value: Any) -> int:
    if value not in (0, 1):
        raise ValueError(f"loss_mask holds {value!r}, wanted 0 or 1")
    return int(value)


def made_sample(sample: Any, sent: samples.Sample, reward_key: str | None, vocabulary: int | None) -> dict:
    """What a generate function returned, checked: ids of the vocabulary, lengths that agree, the sent prompt
    in front, log-probabilities and masks that can be ones, and a reward, if there is one, that is a number or
    holds it under reward_key."""
    if isinstance(sample, samples.GenerateFnOutput):
        sample = sample.samples
    if isinstance(sample, list):
        if len(sample) != 1:
            raise ValueError(f"{len(sample)} samples for one prompt; a generate function returns one")
        sample = sample[0]
    if not isinstance(sample, samples.Sample):
        raise ValueError(f"a {type(sample).__name__} was returned, wanted the sample")
    status = samples.Sample.Status(sample.status)
    if status in (samples.Sample.Status.ABORTED, samples.Sample.Status.FAILED):
        raise ValueError(f"the function gave the sample the status {status.value}")
    length, prompt = operator.index(sample.response_length), sent.tokens
    if length < 0:
        raise ValueError(f"response_length is {length}")
    if not isinstance(sample.response, str):
        raise ValueError(f"response is a {type(sample.response).__name__}, wanted text")
    mask = [1] * length if sample.loss_mask is None else [mask_value(value) for value in sample.loss_mask]
    if sample.rollout_log_probs is None and length > 0:
        raise ValueError("rollout_log_probs is None; give one for each response token, 0.0 for tokens of a tool")
    log_probs = [float(value) for value in sample.rollout_log_probs or []]
    for name, found in (("loss_mask", len(mask)), ("rollout_log_probs", len(log_probs))):
        if found != length:
            raise ValueError(f"{name} has {found} values for response_length {length}")
    for value in log_probs:
        if not -math.inf < value <= 0.0:
            raise ValueError(f"rollout_log_probs holds {value}, wanted finite numbers of at most 0")
    tokens = [int(token) for token in sample.tokens]
    for token in tokens:
        if token < 0 or (vocabulary and token >= vocabulary):
            raise ValueError(f"token id {token} is not in the vocabulary of {vocabulary}")
    if len(tokens) - length < len(prompt) or tokens[: len(prompt)] != prompt:
        raise ValueError(f"{len(tokens)} tokens with response_length {length} do not begin with the prompt's {len(prompt)}")
    if len(tokens) - length != len(prompt):
        raise ValueError(f"{len(tokens) - length} tokens stand before the response, the prompt has {len(prompt)}")
    answer = {"tokens": tokens, "response_length": length, "response": sample.response, "loss_mask": mask,
              "log_probs": log_probs, "removed": bool(sample.remove_sample),
              "status": "truncated" if status == samples.Sample.Status.TRUNCATED else "completed"}
    if sample.reward is not None:
        answer |= {"reward": plain_reward(sample.reward, reward_key), "parts": reward_parts(sample.reward)}
    return answer


class Generation:
    """--custom-generate-function-path in both forms of Miles: async f(args, sample, sampling_params)
    -> sample, with `evaluation` if it takes that, and async f(input) -> GenerateFnOutput."""

    def __init__(self, request: dict, args: argparse.Namespace):
        from tandem import engine_calls

        self._calls = engine_calls
        tokenizer = Tokenizer(args.hf_checkpoint, getattr(args, "chat_template_path", ""))
        engine_calls.engines = engine_calls.Engines(
            request["engines"], request["token"], request["seed"], request["timeout"], tokenizer)
        args.sglang_router_ip, port = request["engines"][0].rsplit(":", 1)
        args.sglang_router_port = int(port)
        args.partial_rollout, args.sglang_speculative_algorithm = False, None
        samples.install_names()
        self._state = State(args, tokenizer)
        self._vocabulary = vocabulary_size(args.hf_checkpoint)
        function = load_function(request["path"])
        self._generate = function() if inspect.isclass(function) else function
        names = list(inspect.signature(self._generate).parameters)
        self._takes_input = not (len(names) >= 3 and names[0] != "input")
        self._takes_evaluation = "evaluation" in names

    async def function(self, sample: samples.Sample, params: dict, evaluation: bool) -> Any:
        self._calls.current.set(self._calls.Turns(sample.index, sample.group_index, evaluation))
        if self._takes_input:
            given = samples.GenerateFnInput(self._state, sample, params, evaluation)
            made = self._generate(given)
        elif self._takes_evaluation:
            made = self._generate(self._state.args, sample, params, evaluation=evaluation)
        else:
            made = self._generate(self._state.args, sample, params)
        made = await made if inspect.isawaitable(made) else made
        return made, self._calls.current.get().versions

    def call(self, request: dict) -> Any:
        sample = samples.Sample.from_dict(request["samples"][0])
        return self.function(sample, dict(request["sampling_params"]), request["evaluation"])

    def value(self, request: dict, result: Any) -> dict:
        made, versions = result
        sent = samples.Sample.from_dict(request["samples"][0])
        answer = made_sample(made, sent, getattr(self._state.args, "reward_key", None), self._vocabulary)
        if not versions and any(answer["loss_mask"]):
            raise ValueError("loss_mask is 1 for tokens, but the function called no engine: the model did not write them")
        return {**answer, "weight_version": min(versions, default=-1)}


def is_async(function: Callable) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))


def make_kind(request: dict, args: argparse.Namespace) -> Any:
    if request["kind"] == "reward":
        return Rewards(request, args)
    if request["kind"] == "filter":
        return Filter(request, args)
    if request["kind"] == "generate":
        return Generation(request, args)
    raise ValueError(f"unknown kind '{request['kind']}'")


class Server:
    """Reads requests in a thread, so that asynchronous calls and the pipe do not wait for each other."""

    def __init__(self):
        self._reader, self._writer = pipe.take_standard_streams()
        self._kind: Any = None
        self._timeout = math.inf
        self._blocked = 0.0  # seconds for which the event loop stood still
        self._begun: dict[asyncio.Task, float] = {}  # asynchronous calls: monotonic time less blocked time

    def _send(self, reply: dict) -> None:
        """What has no form in JSON and UTF-8 becomes the call's error."""
        try:
            payload = json.dumps(reply, ensure_ascii=False, allow_nan=False).encode("utf-8")
        except (TypeError, ValueError) as error:
            fault = {**({"id": reply["id"]} if "id" in reply else {}), "error": f"its result cannot be sent: {pipe.error_text(error)}"}
            payload = json.dumps(fault).encode("utf-8")
        pipe.write_frame(self._writer, payload)

    def _load(self, request: dict) -> None:
        try:
            self._timeout = request["timeout"]
            self._kind = make_kind(request, argparse.Namespace(**request["arguments"]))
        except BaseException as error:  # SystemExit of a module at import is a fault as well
            self._send({"error": fault_text(error)})
            return
        asynchronous = is_async(self._kind.function)
        self._send({"is_async": asynchronous})
        if asynchronous:
            self._watch = asyncio.get_running_loop().create_task(self._watch_calls())

    async def _watch_calls(self) -> None:
        """Ends asynchronous calls whose time is over; the time for which others blocked the event loop (as
        time.sleep or requests do) does not count, and is told once."""
        told = False
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            late = time.monotonic() - before - TICK_SECONDS
            self._blocked += max(late, 0.0)
            now = time.monotonic() - self._blocked
            for call, begun in list(self._begun.items()):
                if now - begun > self._timeout:
                    call.cancel()
            if late >= BLOCKED_SECONDS and not told:
                told = True
                self._send({"notice": f"the function is 'async def' but blocked its event loop for {late:.1f} s, so that "
                                      "the other calls of its process waited; await what takes time, or make it a plain "
                                      "function, whose calls get processes of their own"})

    async def _run(self, request: dict) -> None:
        call, begun = asyncio.current_task(), math.inf
        try:
            result = self._kind.call(request)
            if inspect.isawaitable(result):
                self._begun[call] = begun = time.monotonic() - self._blocked
                result = await result
            reply = {"id": request["id"], "value": self._kind.value(request, result)}
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            over = time.monotonic() - self._blocked - begun >= self._timeout
            reply = {"id": request["id"], "error": f"no result within {self._timeout:g} s" if over else fault_text(error)}
        self._begun.pop(call, None)
        self._send(reply)  # from the call's own task: one that blocks next cannot hold it back

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        requests: asyncio.Queue = asyncio.Queue()

        def read() -> None:
            try:
                while (payload := pipe.read_frame(self._reader)) is not None:
                    loop.call_soon_threadsafe(requests.put_nowait, json.loads(payload))
            finally:
                loop.call_soon_threadsafe(requests.put_nowait, None)

        threading.Thread(target=read, daemon=True).start()
        open_calls: set[asyncio.Task] = set()
        while (request := await requests.get()) is not None:
            if request["call"] == "load":
                self._load(request)
            elif is_async(self._kind.function):
                task = asyncio.create_task(self._run(request))
                open_calls.add(task)
                task.add_done_callback(open_calls.discard)
            else:
                await self._run(request)


def main() -> None:
    parser = argparse.ArgumentParser(description="Calls users' functions over a framed pipe.")
    parser.add_argument("--memory-limit-mb", type=int, default=0, help="limit of private memory, 0: none")
    options = parser.parse_args()
    if options.memory_limit_mb > 0:
        limit = options.memory_limit_mb << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.setrecursionlimit(10000)
    asyncio.run(Server().serve())


if __name__ == "__main__":
    main()
