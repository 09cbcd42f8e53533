"""Users' reward functions in the helper process: every way to call one, every way in which one fails,
and the reward server with kept connections and repeated attempts."""

import http.server
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FUNCTIONS = """
import asyncio, os, sys, time
from miles.utils.types import Sample

def length(args, sample):
    assert isinstance(sample, Sample) and args.rm_type == "mine"
    print("this goes to the log, not into the frames")
    return sample.response_length

async def by_label(args, sample, **kwargs):
    await asyncio.sleep(0.2 if sample.label == "slow" else 0)
    return {"score": 1.0 if sample.response == sample.label else -1.0, "acc": True, "why": "text"}

async def whole_group(args, samples):
    best = max(sample.response_length for sample in samples)
    return [sample.response_length / best for sample in samples]

def bad(args, sample):
    if sample.label == "raise":
        raise KeyError("no such thing")
    if sample.label == "exit":
        sys.exit(3)
    if sample.label == "memory":
        return len(bytearray(2 << 30))
    return {"none": None, "nan": float("nan"), "text": "7", "inf": float("inf"), "dict": {"a": 1},
            "numpy": __import__("numpy").float32(0.5), "bool": True, "big": 10**400}[sample.label]

async def sleeps(args, sample):
    await asyncio.sleep(sample.metadata["seconds"])
    return 1

def metadata(args, sample):
    return 1.0 if sample.metadata["id"] == 72057594038135102 else 0.0

def wrong_count(args, samples):
    return [1.0]
"""


class Helper:
    def __init__(self, folder, *arguments):
        path = os.pathsep.join([str(ROOT / "python"), str(folder)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tandem.function_helper", *arguments], cwd=folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"})

    def send(self, request):
        payload = json.dumps(request).encode()
        self.process.stdin.write(struct.pack("<I", len(payload)) + payload)
        self.process.stdin.flush()

    def receive(self):
        (size,) = struct.unpack("<I", self.process.stdout.read(4))
        return json.loads(self.process.stdout.read(size))

    def load(self, function, arguments=None, **more):
        self.send({"call": "load", "kind": "reward", "path": function, "timeout": 1.0,
                   "arguments": {"reward_key": None, "rm_type": "mine", **(arguments or {})}, **more})
        return self.receive()

    def close(self):
        self.process.stdin.close()
        status = self.process.wait(timeout=30)
        self.process.stdout.close()
        errors = self.process.stderr.read().decode()
        self.process.stderr.close()
        return status, errors


GENERATORS = """
from argparse import Namespace
from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_utils.generate_endpoint_utils import (
    compute_prompt_ids_from_sample, compute_request_payload, update_sample_from_response)
from miles.utils.http_utils import post
from miles.utils.types import Sample

async def one_turn(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True})
    items = output["meta_info"]["output_token_logprobs"]
    sample.tokens = sample.tokens + [item[1] for item in items]
    sample.response, sample.response_length = output["text"], len(items)
    sample.rollout_log_probs = [item[0] for item in items]
    sample.status = Sample.Status.COMPLETED
    return sample

async def several(args, sample, sampling_params):
    return await one_turn(args, sample, {**sampling_params, "n": 4})

async def tool_loop(input: GenerateFnInput) -> GenerateFnOutput:
    args, sample = input.args, input.sample
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = compute_prompt_ids_from_sample(input.state, sample)
    for turn in range(2):
        payload, halt = compute_request_payload(args, sample.tokens, input.sampling_params)
        if payload is None:
            sample.status = halt
            break
        await update_sample_from_response(args, sample, payload, await post(url, payload), update_loss_mask=True)
        if turn == 0:
            tool = input.state.tokenizer.encode(" world")
            sample.tokens = sample.tokens + tool
            sample.response += " world"
            sample.response_length += len(tool)
            sample.loss_mask += [0] * len(tool)
            sample.rollout_log_probs += [0.0] * len(tool)
    sample.reward = 0.5
    return GenerateFnOutput(samples=sample)

async def spoils(args, sample, sampling_params, evaluation=False):
    assert evaluation
    made = await one_turn(args, sample, sampling_params)
    kind = sample.label
    if kind == "short mask":
        made.loss_mask = [1]
    if kind == "no log-probabilities":
        made.rollout_log_probs = None
    if kind == "another prompt":
        made.tokens = [9] + made.tokens[1:]
    if kind == "aborted":
        made.status = Sample.Status.ABORTED
    if kind == "list":
        return [made, made]
    if kind.startswith("reward "):
        made.reward = {"nan": float("nan"), "object": {"score": 2, "acc": True, "why": "text"}}[kind[7:]]
    if kind == "nothing":
        return None
    odd = {"bytes": ("response", b"bytes"), "surrogate": ("response", "\\ud800"), "nan log-probability": ("rollout_log_probs", [float("nan"), 0.0]),
           "positive log-probability": ("rollout_log_probs", [5.0, 0.0]), "foreign id": ("tokens", made.tokens[:-1] + [10**7]),
           "negative id": ("tokens", made.tokens[:-1] + [-1]), "half mask": ("loss_mask", [0.5, 1])}
    if kind in odd:
        setattr(made, *odd[kind])
    return made

async def calls_nobody(args, sample, sampling_params):
    sample.tokens, sample.response_length, sample.rollout_log_probs = sample.tokens + [5, 5], 2, [0.0, 0.0]
    sample.loss_mask, sample.status = [int(sample.label == "its own"), 0], Sample.Status.COMPLETED
    return sample

async def gives_up(args, sample, sampling_params):
    raise __import__("asyncio").CancelledError("enough")
"""


class FakeEngine(http.server.BaseHTTPRequestHandler):
    """Answers /generate as the engine does: without text, token ids that depend on the prompt."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append((self.path, self.headers.get("Authorization"), payload))
        ids = [self.server.word, len(payload["input_ids"]) % 50 + 20]
        spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}] if self.server.met else []
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "4", "completion_tokens": 2, "weight_versions": spans,
                "output_token_logprobs": [[-0.5, ids[0], None], [-0.25, ids[1], None]]}
        body = json.dumps({"output_ids": ids, "meta_info": meta}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def sample(label="", response="", **more):
    return {"index": 3, "label": label, "response": response, "response_length": len(response),
            "status": "completed", "metadata": {}, **more}


class Functions(unittest.TestCase):
    def setUp(self):
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        (self.folder / "my_rewards.py").write_text(textwrap.dedent(FUNCTIONS))
        self.helpers = []

    def tearDown(self):
        for helper in self.helpers:
            if helper.process.poll() is None and not helper.process.stdin.closed:
                helper.close()
        self._folder.cleanup()

    def helper(self, *arguments):
        self.helpers.append(Helper(self.folder, *arguments))
        return self.helpers[-1]

    def run_all(self, helper, calls):
        for i, samples in enumerate(calls):
            helper.send({"call": "run", "id": i, "samples": samples})
        return {reply["id"]: reply for reply in (helper.receive() for _ in calls)}

    def test_one_sample_synchronous(self):
        helper = self.helper()
        self.assertEqual(helper.load("my_rewards.length"), {"is_async": False})
        replies = self.run_all(helper, [[sample(response="abc")], [sample(response="")]])
        self.assertEqual([replies[i]["value"][0]["reward"] for i in range(2)], [3.0, 0.0])
        status, errors = helper.close()
        self.assertEqual(status, 0)
        self.assertIn("this goes to the log", errors)

    def test_a_module_may_hold_a_reward_beside_a_generate_function(self):
        (self.folder / "both.py").write_text(GENERATORS + "\ndef one(args, sample):\n    return 1\n")
        helper = self.helper()
        self.assertEqual(helper.load("both.one"), {"is_async": False})
        self.assertEqual(self.run_all(helper, [[sample()]])[0]["value"][0]["reward"], 1.0)

    def test_asynchronous_calls_run_side_by_side(self):
        helper = self.helper()
        self.assertEqual(helper.load("my_rewards.by_label", {"reward_key": "score"}), {"is_async": True})
        order = []
        for i, label in enumerate(["slow", "fast"]):
            helper.send({"call": "run", "id": i, "samples": [sample(label, "fast")]})
        for _ in range(2):
            reply = helper.receive()
            order.append(reply["id"])
            self.assertEqual(reply["value"][0]["parts"], {"score": [-1.0, 1.0][reply["id"]], "acc": 1.0})
        self.assertEqual(order, [1, 0])

    def test_a_whole_group_in_one_call(self):
        helper = self.helper()
        helper.load("my_rewards.whole_group", batch=True)
        replies = self.run_all(helper, [[sample(response="ab"), sample(response="abcd")]])
        self.assertEqual([item["reward"] for item in replies[0]["value"]], [0.5, 1.0])
        helper = self.helper()
        helper.load("my_rewards.wrong_count", batch=True)
        self.assertIn("1 rewards for 2 samples", self.run_all(helper, [[sample(), sample()]])[0]["error"])

    def test_every_failure_is_the_samples_own(self):
        helper = self.helper("--memory-limit-mb", "1000")
        helper.load("my_rewards.bad")
        labels = ["raise", "exit", "none", "nan", "text", "inf", "dict", "big", "memory", "numpy", "bool"]
        replies = self.run_all(helper, [[sample(label)] for label in labels])
        found = {}
        for i, label in enumerate(labels):
            reply = replies[i]
            found[label] = reply.get("error") or reply["value"][0].get("error") or reply["value"][0]["reward"]
        self.assertIn("KeyError: 'no such thing'", found["raise"])
        self.assertIn("my_rewards.py:", found["raise"])
        self.assertIn("SystemExit: 3", found["exit"])
        self.assertIn("None", found["none"])
        self.assertIn("nan", found["nan"])
        self.assertIn("a str ('7')", found["text"])
        self.assertIn("inf", found["inf"])
        self.assertIn("--reward-key", found["dict"])
        self.assertIn("OverflowError", found["big"])
        self.assertIn("MemoryError", found["memory"])
        self.assertEqual((found["numpy"], found["bool"]), (0.5, 1.0))

    def test_a_slow_asynchronous_call_times_out_alone(self):
        helper = self.helper()
        helper.load("my_rewards.sleeps")
        replies = self.run_all(helper, [[sample(metadata={"seconds": 30})], [sample(metadata={"seconds": 0})]])
        self.assertIn("no result within 1 s", replies[0]["error"])
        self.assertEqual(replies[1]["value"][0]["reward"], 1.0)

    def test_metadata_keeps_its_digits(self):
        helper = self.helper()
        helper.load("my_rewards.metadata")
        self.assertEqual(self.run_all(helper, [[sample(metadata={"id": 72057594038135102})]])[0]["value"][0]["reward"], 1.0)

    def test_what_cannot_be_loaded_says_why(self):
        (self.folder / "broken.py").write_text("import does_not_exist\n")
        (self.folder / "leaves.py").write_text("raise SystemExit(1)\n")
        for path, parts in [("my_rewards.nothing", ["no function 'nothing'", "my_rewards.py"]),
                            ("nowhere.f", ["nowhere"]), ("broken.f", ["does_not_exist", "broken.py:1"]),
                            ("leaves.f", ["SystemExit"]), ("nodots", ["module.function"])]:
            error = self.helper().load(path)["error"]
            for part in parts:
                self.assertIn(part, error)


class Generators(unittest.TestCase):
    def setUp(self):
        sys.path.insert(0, str(ROOT / "tests/unit"))
        from helper_test import make_folder

        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        (self.folder / "my_generate.py").write_text(GENERATORS)
        make_folder(self.folder / "model")
        (self.folder / "model/config.json").write_text('{"vocab_size": 50000}')
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(self.folder / "model/tokenizer.json"))
        self.tokenizer.no_truncation()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeEngine)
        self.server.lock, self.server.seen, self.server.met = threading.Lock(), [], False
        self.server.word = self.tokenizer.encode("hello").ids[0]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def tearDown(self):
        self.helper.close()
        self.server.shutdown()
        self.server.server_close()
        self._folder.cleanup()

    def load(self, function, context=None, reward_key=None):
        self.helper = Helper(self.folder)
        self.helper.send({"call": "load", "kind": "generate", "path": f"my_generate.{function}", "timeout": 30,
                          "engines": [f"127.0.0.1:{self.server.server_address[1]}"], "token": "secret", "seed": 11,
                          "arguments": {"hf_checkpoint": str(self.folder / "model"), "rollout_max_response_len": 8,
                                        "rollout_max_context_len": context, "reward_key": reward_key}})
        self.assertEqual(self.helper.receive(), {"is_async": True})

    def run_one(self, evaluation=False, **more):
        self.helper.send({"call": "run", "id": 1, "evaluation": evaluation,
                          "sampling_params": {"temperature": 1.0, "max_new_tokens": 8},
                          "samples": [sample(index=6, group_index=3, prompt="hello hello", status="pending",
                                             tokens=[5, 6, 7], **more) | {"response": "", "response_length": 0}]})
        return self.helper.receive()

    def test_one_turn(self):
        self.load("one_turn")
        value = self.run_one()["value"]
        word = self.server.word
        self.assertEqual(value["tokens"], [5, 6, 7, word, 23])
        self.assertEqual((value["loss_mask"], value["log_probs"]), ([1, 1], [-0.5, -0.25]))
        self.assertEqual(value["response"], self.tokenizer.decode([word, 23]))
        self.assertEqual((value["weight_version"], value["status"], value.get("reward")), (4, "completed", None))
        path, token, payload = self.server.seen[0]
        self.assertEqual((path, token), ("/generate", "Bearer secret"))
        self.assertEqual((payload["sample_id"], payload["evaluation"]), (6, False))
        self.assertEqual(payload["sampling_params"]["sampling_seed"], 11)

    def test_an_answer_that_an_update_met_is_as_old_as_its_first_token(self):
        self.server.met = True
        self.load("one_turn")
        self.assertEqual(self.run_one()["value"]["weight_version"], 3)

    def test_several_answers_of_one_call_are_refused(self):
        self.load("several")
        self.assertIn("n is 4; ask for several answers by several calls", json.dumps(self.run_one()))
        self.assertEqual(self.server.seen, [])

    def test_two_turns_with_a_tool_between(self):
        self.load("tool_loop")
        value = self.run_one()["value"]
        tool = self.tokenizer.encode(" world", add_special_tokens=False).ids
        word = self.server.word
        self.assertEqual(value["tokens"], [5, 6, 7, word, 23, *tool, word, 25 + len(tool)])
        self.assertEqual(value["loss_mask"], [1, 1, *[0] * len(tool), 1, 1])
        self.assertEqual(value["log_probs"], [-0.5, -0.25, *[0.0] * len(tool), -0.5, -0.25])
        self.assertEqual(value["response_length"], 4 + len(tool))
        self.assertEqual(value["reward"], 0.5)
        # The second turn sends the very ids of the first and draws from a key space of its own.
        second = self.server.seen[1][2]
        self.assertEqual(second["input_ids"], [5, 6, 7, word, 23, *tool])
        self.assertEqual(second["sample_id"], 6 + (1 << 48))

    def test_the_context_ends_the_turns(self):
        self.load("tool_loop", context=6)
        value = self.run_one()["value"]
        self.assertEqual(value["status"], "truncated")
        self.assertEqual(self.server.seen[0][2]["sampling_params"]["max_new_tokens"], 3)

    def test_samples_that_do_not_fit_are_refused_by_name(self):
        self.load("spoils")
        for label, part in [("short mask", "loss_mask has 1 values"), ("no log-probabilities", "rollout_log_probs is None"),
                            ("another prompt", "do not begin with the prompt"), ("aborted", "aborted"),
                            ("list", "2 samples for one prompt"), ("nothing", "NoneType"),
                            ("reward nan", "the reward is nan"), ("reward object", "--reward-key"),
                            ("bytes", "response is a bytes"), ("surrogate", "cannot be sent"),
                            ("nan log-probability", "rollout_log_probs holds nan"),
                            ("positive log-probability", "rollout_log_probs holds 5.0"),
                            ("foreign id", "token id 10000000 is not in the vocabulary"),
                            ("negative id", "token id -1"), ("half mask", "loss_mask holds 0.5")]:
            self.assertIn(part, self.run_one(evaluation=True, label=label)["error"])
        self.assertTrue(self.server.seen[0][2]["evaluation"])
        self.helper.close()
        self.load("calls_nobody")
        self.assertEqual(self.run_one(label="a tool's")["value"]["loss_mask"], [0, 0])
        self.assertIn("called no engine", self.run_one(label="its own")["error"])
        self.helper.close()
        self.load("gives_up")
        self.assertIn("CancelledError: enough", self.run_one()["error"])
        self.helper.close()
        self.load("spoils", reward_key="score")
        value = self.run_one(evaluation=True, label="reward object")["value"]
        self.assertEqual((value["reward"], value["parts"]), (2.0, {"score": 2.0, "acc": 1.0}))


class RewardServer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.connections.add(self.client_address)
            server.seen.append(payload)
            times = sum(p["label"] == payload["label"] for p in server.seen)
        if payload["label"] == "lost" and times < 3:
            self.close_connection = True  # no answer at all
            return
        if payload["label"] == "silent":
            server.silence.wait(60)
            self.close_connection = True
            return
        status, body = {"ok": (200, b"0.25"), "object": (200, b'{"score": 2, "acc": 1}'),
                        "busy": (503 if times < 3 else 200, b"1"), "lost": (200, b"0.75"), "never": (500, b"broken inside"),
                        "refused": (400, b"no label like that"), "text": (200, b"good!")}[payload["label"]]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class RemoteReward(unittest.TestCase):
    def test_server(self):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RewardServer)
        server.lock, server.connections, server.seen = threading.Lock(), set(), []
        server.silence = threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with tempfile.TemporaryDirectory() as folder:
            helper = Helper(folder)
            url = f"http://127.0.0.1:{server.server_address[1]}/reward"

            def load(helper, url, timeout):
                helper.send({"call": "load", "kind": "reward", "path": "tandem.remote_rm.remote_rm", "timeout": timeout,
                             "arguments": {"reward_key": None, "rm_url": url, "reward_timeout_seconds": timeout}})
                self.assertEqual(helper.receive(), {"is_async": True})

            def ask(label, helper=helper):
                helper.send({"call": "run", "id": 7, "samples": [sample(label, "answer", prompt="question")]})
                reply = helper.receive()
                return reply.get("error") or reply["value"][0].get("error") or reply["value"][0]["reward"]

            load(helper, url, 20)
            self.assertEqual([ask("ok") for _ in range(5)], [0.25] * 5)
            self.assertEqual(server.seen[0], {"prompt": "question", "response": "answer", "label": "ok"})
            self.assertLess(len(server.connections), 5)  # kept and used again
            self.assertEqual(ask("busy"), 1.0)
            self.assertIn("--reward-key", ask("object"))
            self.assertIn("status 500: broken inside", ask("never"))
            self.assertEqual(sum(p["label"] == "never" for p in server.seen), 4)
            self.assertIn("status 400: no label like that", ask("refused"))
            self.assertEqual(sum(p["label"] == "refused" for p in server.seen), 1)
            self.assertIn("not JSON", ask("text"))
            self.assertEqual(ask("lost"), 0.75)  # twice without an answer, then one
            self.assertEqual(sum(p["label"] == "lost" for p in server.seen), 3)
            helper.close()

            hasty = Helper(folder)
            load(hasty, url, 1)
            self.assertIn("within 1 s", ask("silent", hasty))
            self.assertEqual(ask("ok", hasty), 0.25)  # one silence takes nothing else along
            hasty.close()
            server.silence.set()
            server.shutdown()
            server.server_close()

            lonely = Helper(folder)
            with socket.socket() as nobody:  # bound, but nobody listens
                nobody.bind(("127.0.0.1", 0))
                load(lonely, f"http://127.0.0.1:{nobody.getsockname()[1]}/reward", 20)
                self.assertIn("refused", ask("ok", lonely))
            lonely.close()


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    unittest.main()
