"""Users' functions in whole runs on a tiny model: rewards of every kind and every way to fail, one and
several turns of generation, filters, a reward server."""

import http.server
import json
import os
import threading
import unittest

from tiny_run import DEVICE_FLAGS, ROOT, TinyRun, tensors_of

FUNCTIONS = """
import os, time
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.utils.http_utils import post
from miles.utils.types import Sample

def by_tokens(args, sample):
    return float(sum(sample.tokens) % 5)

def fails(args, sample):
    kind = sample.index % 16
    if kind == 1:
        raise RuntimeError("the judge is away")
    if kind == 2:
        return None
    if kind == 3:
        return float("nan")
    if kind == 4:
        os._exit(5)
    if kind == 5:
        time.sleep(600)
    if kind == 6:
        return len(bytearray(2 << 30))
    return float(sum(sample.tokens) % 2)

def always(args, sample):
    raise RuntimeError("nothing works")

def same(args, sample):
    return 1.0

# Finite, and too large for any f32.
def huge(args, sample):
    return 1e100 * (sample.index % 2)

async def digits(args, sample):
    wanted = {"id": 10254939386542155531, "text": "\u00e9", "list": [9007199254740993]}
    tools = '[{"z": 72057594038135102, "a": 1}]'
    labels = [72057594038135102, "72057594038135102", {"ground_truth": ["7", 7.5], "style": None}]
    return float(sample.label == labels[sample.group_index % 3] and sample.metadata == wanted
                 and tools in sample.prompt and "two  spaces" in sample.prompt)

def of_group(args, samples):
    return [float(i) for i, _ in enumerate(samples)]

def keep_even(args, samples, **kwargs):
    even = samples[0].group_index % 2 == 0
    return DynamicFilterOutput(keep=even, reason=None if even else "odd")

async def one_turn(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": sample.tokens, "sampling_params": sampling_params})
    items = output["meta_info"]["output_token_logprobs"]
    sample.tokens = sample.tokens + [item[1] for item in items]
    sample.response, sample.response_length = output["text"], len(items)
    sample.rollout_log_probs = [item[0] for item in items]
    sample.update_from_meta_info(args, output["meta_info"])
    return sample

async def another_model(args, sample, sampling_params):
    sample = await one_turn(args, sample, sampling_params)
    sample.rollout_log_probs = [value - 0.25 for value in sample.rollout_log_probs]
    return sample

async def sometimes(args, sample, sampling_params):
    if sample.index % 4 == 0:
        raise RuntimeError("the environment fell over")
    return await one_turn(args, sample, sampling_params)
"""


class Functions(TinyRun):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        (cls.folder / "mine.py").write_text(FUNCTIONS)

    def train(self, name, *more, code=0, rm=("--rm-type", "last-number")):
        arguments = ["train", "--hf-checkpoint", self.model, "--colocate",
                     "--prompt-data", f"{ROOT}/examples/addition/train.jsonl@[0:32]",
                     "--input-key", "prompt", "--label-key", "label", "--apply-chat-template",
                     "--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
                     "--rollout-max-response-len", "8", "--lr", "1e-3", "--threads-per-rank", "1",
                     *DEVICE_FLAGS, "--run-dir", self.folder / name, *rm, *more]
        return self.run_tandem(*arguments, code=code, env={**os.environ, "PYTHONPATH": str(self.folder)})

    def rollout(self, name, step):
        """Samples' texts, tensors and all bytes of a saved rollout."""
        data = (self.folder / name / f"rollouts/rollout_{step:07d}.safetensors").read_bytes()
        metadata, tensors = tensors_of(data)
        return json.loads(metadata["samples"]), tensors, data

    def test_a_function_equals_the_rule_that_it_spells_out(self):
        self.train("rule")
        self.train("function", rm=("--custom-rm-path", "examples.addition.functions.reward",
                                        "--reward-key", "score"))
        rule, function = self.rows("rule"), self.rows("function")
        for row in function:
            self.assertIn("rollout/reward/has_number", row)
            row.pop("rollout/reward/has_number"), row.pop("rollout/reward/score")
        self.assertEqual(rule, function)

    def test_a_group_in_one_call(self):
        self.train("group", rm=("--custom-rm-path", "mine.of_group", "--group-rm"))
        self.assertEqual([row["rollout/raw_reward"] for row in self.rows("group")], [1.5, 1.5])

    def test_every_failure_is_its_samples_own_and_the_run_goes_on(self):
        out = self.train("fails", "--reward-timeout-seconds", "5", "--rm-memory-limit-mb", "1000",
                              rm=("--custom-rm-path", "mine.fails"))
        self.assertEqual([row["rollout/failed_samples"] for row in self.rows("fails")], [6, 6])
        for text in ("the judge is away", "mine.py:", "the reward is None", "the reward is nan",
                     "exited with code 5", "no result within 5 s", "MemoryError"):
            self.assertIn(text, out)
        samples = self.rollout("fails", 0)[0]
        self.assertEqual([i for i, s in enumerate(samples) if s["status"] == "failed"], [1, 2, 3, 4, 5, 6])
        self.assertIn("the judge is away", samples[1]["error"])

        out = self.train("stops", "--stop-on-reward-failure", code=1, rm=("--custom-rm-path", "mine.always"))
        self.assertIn("nothing works", out)
        out = self.train("none", code=1, rm=("--custom-rm-path", "mine.always"))
        self.assertIn("all 16 samples failed", out)
        out = self.train("missing", code=1, rm=("--custom-rm-path", "mine.nowhere"))
        self.assertIn("no function 'nowhere'", out)
        self.assertFalse((self.folder / "missing/metrics.jsonl").exists())

    def test_what_a_row_says_reaches_the_function_digit_for_digit(self):
        (self.folder / "tools.jinja").write_text(
            "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
        rows = self.folder / "digits.jsonl"
        labels = ['72057594038135102', '"72057594038135102"', '{"ground_truth": ["7", 7.5], "style": null}']
        rows.write_text("".join(
            '{"prompt": [{"role": "user", "content": "two  spaces"}], "label": ' + label + ', "metadata": '
            '{"id": 10254939386542155531, "text": "\u00e9", "list": [9007199254740993]}, '
            '"tools": [{"z": 72057594038135102, "a": 1}]}\n' for label in labels)
            + '{"prompt": [{"role": "user"\n{"label": 1}\n', encoding="utf-8")
        flags = ("--prompt-data", rows, "--chat-template-path", self.folder / "tools.jinja", "--rollout-batch-size", "3",
                 "--no-rollout-shuffle")
        out = self.train("strict", *flags, code=1, rm=("--custom-rm-path", "mine.digits"))
        self.assertIn("digits.jsonl: line 4: not valid JSON", out)
        out = self.train("digits", *flags, "--skip-bad-rows", rm=("--custom-rm-path", "mine.digits"))
        for part in ("line 4 skipped", "line 5 skipped: no key 'prompt'", "3 prompts (5 rows read, 2 bad"):
            self.assertIn(part, out)
        self.assertEqual([row["rollout/raw_reward"] for row in self.rows("digits")], [1.0, 1.0])

    def test_gradients_that_are_not_finite_end_the_run_after_a_few(self):
        out = self.train("huge", "--disable-grpo-std-normalization", "--num-rollout", "9", "--max-skipped-steps",
                              "2", code=1, rm=("--custom-rm-path", "mine.huge"))
        self.assertRegex(out, "step 1: gradient norm -?(nan|inf): the optimizer step was skipped, no state changed")
        self.assertIn("--max-skipped-steps: 2 optimizer steps in a row", out)
        rows = self.rows("huge")
        self.assertEqual([row["train/skipped_steps"] for row in rows], [1])
        self.assertIsNone(rows[0]["train/grad_norm"])  # JSON has no NaN

    def test_a_constant_reward_is_noticed(self):
        out = self.train("constant", "--constant-reward-steps", "2", rm=("--custom-rm-path", "mine.same"))
        self.assertIn("the reward was 1 for every sample of the last 2 steps", out)

    def test_a_generate_function_of_one_turn_gives_the_engines_own_answers(self):
        self.train("own", rm=("--custom-rm-path", "mine.by_tokens"))
        self.train("turn", "--custom-generate-function-path", "mine.one_turn",
                        rm=("--custom-rm-path", "mine.by_tokens"))
        self.assertEqual(self.rows("own"), self.rows("turn"))
        self.assertEqual(self.rollout("own", 1)[2], self.rollout("turn", 1)[2])

    def test_several_turns_keep_masks_and_agree_with_the_trainer(self):
        flags = ("--custom-generate-function-path", "examples.addition.functions.two_tries", "--reward-key", "score")
        rm = ("--custom-rm-path", "examples.addition.functions.reward")
        self.train("turns", *flags, rm=rm)
        for step, row in enumerate(self.rows("turns")):
            self.assertEqual(row["train/train_rollout_logprob_abs_diff_max"], 0)
            # Two answers of at most 8 tokens; the words between them are in the response, not in the loss.
            tensors = self.rollout("turns", step)[1]
            self.assertGreater(max(tensors["response_lengths"]), 16)
            self.assertEqual(row["train/loss_tokens"], sum(tensors["loss_mask"]))
            self.assertLessEqual(row["rollout/response_len/max"], 16)
        self.train("turns-again", *flags, "--max-running-requests", "3", rm=rm)
        self.assertEqual(self.rows("turns"), self.rows("turns-again"))
        self.assertEqual(self.rollout("turns", 1)[2], self.rollout("turns-again", 1)[2])

    def test_a_failed_generation_is_its_samples_own(self):
        self.train("sometimes", "--custom-generate-function-path", "mine.sometimes",
                        rm=("--custom-rm-path", "mine.by_tokens"))
        self.assertEqual([row["rollout/failed_samples"] for row in self.rows("sometimes")], [4, 4])
        texts, tensors, _ = self.rollout("sometimes", 0)
        self.assertIn("the environment fell over", texts[0]["error"])
        # What was not generated has no length that could shorten the means.
        lengths = [n for n, text in zip(tensors["response_lengths"], texts) if text["status"] != "failed"]
        self.assertEqual(len(lengths), 12)
        row = self.rows("sometimes")[0]
        self.assertAlmostEqual(row["rollout/response_len/mean"], sum(lengths) / 12, places=12)
        self.assertEqual(row["rollout/response_len/min"], min(lengths))
        out = self.run_tandem("inspect", self.folder / "sometimes/rollouts/rollout_0000000.safetensors")
        self.assertIn(f"{sum(lengths) / 12:.1f}", out)

    def test_log_probabilities_of_another_model_are_noticed(self):
        out = self.train("other", "--custom-generate-function-path", "mine.another_model",
                         rm=("--custom-rm-path", "mine.by_tokens"))
        self.assertIn("log-probabilities of the rollout are up to 0.25", out)
        self.assertIn("did not get from this engine", out)

    def test_filters_draw_until_the_rollout_is_full(self):
        rm = ("--custom-rm-path", "mine.by_tokens")
        self.train("built-in", "--dynamic-sampling-filter-path", "check_reward_nonzero_std", rm=rm)
        for row in self.rows("built-in"):
            self.assertEqual((row["rollout/zero_std/count"], row["rollout/num_samples"]), (0, 16))
        self.train("even", "--dynamic-sampling-filter-path", "mine.keep_even", rm=rm)
        for row in self.rows("even"):
            self.assertEqual((row["rollout/num_prompts"], row["rollout/dynamic_filter/drop_odd"]), (8, 4))
        out = self.train("never", "--dynamic-sampling-filter-path", "check_reward_nonzero_std", code=1,
                              rm=("--custom-rm-path", "mine.same"))
        self.assertIn("zero_std_1.0", out)

    def test_a_reward_server(self):
        class Server(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body = json.dumps(float(len(payload["response"]) % 3)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.train("remote", rm=("--rm-type", "remote_rm", "--rm-url",
                                      f"http://127.0.0.1:{server.server_address[1]}/judge"))
        server.shutdown()
        server.server_close()
        samples = self.rollout("remote", 0)[0]
        wanted = sum(len(s["response"]) % 3 for s in samples) / len(samples)
        self.assertAlmostEqual(self.rows("remote")[0]["rollout/raw_reward"], wanted)


if __name__ == "__main__":
    unittest.main(verbosity=2)
