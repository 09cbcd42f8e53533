"""The demo on the real model, ten steps of one seed: right answers rise by at least 0.3, and trainer
and engine agree exactly at every step.

With TANDEM_TEST_DEVICE=cuda in the environment on a GPU, in exact mode. In float32: bf16 weights, which take
a step of 1e-5 only once several have added up, learn later."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE = os.environ.get("TANDEM_TEST_DEVICE", "cpu")
DEVICE_FLAGS = ["--device", DEVICE, *(["--true-on-policy-mode"] if DEVICE == "cuda" else [])]
BUILD = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else ROOT / "build")


class Demo(unittest.TestCase):
    def test_ten_steps_raise_the_held_out_reward(self):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="tandem-demo-"))
        self.addCleanup(shutil.rmtree, folder)
        command = [
            BUILD / "tandem", "train", "--hf-checkpoint", ROOT / "models/SmolLM2-135M-Instruct",
            "--colocate", "--dtype", "float32", "--prompt-data", ROOT / "examples/addition/train.jsonl",
            "--input-key", "prompt", "--label-key", "label", "--apply-chat-template",
            "--rm-type", "last-number", "--rollout-shuffle",
            "--eval-prompt-data", "addition", ROOT / "examples/addition/eval.jsonl",
            "--num-rollout", "10", "--rollout-batch-size", "8", "--n-samples-per-prompt", "8",
            "--rollout-max-response-len", "16", "--rollout-temperature", "1", "--lr", "1e-5",
            "--lr-decay-style", "cosine", "--lr-decay-iters", "60",
            "--adam-beta1", "0.9", "--adam-beta2", "0.95", "--clip-grad", "1.0", *DEVICE_FLAGS,
            "--run-dir", folder / "run"]
        done = subprocess.run([str(w) for w in command], capture_output=True, text=True, timeout=1100)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        steps = [r for r in rows if "train/loss" in r]
        self.assertEqual(len(steps), 10)
        for row in steps:
            self.assertEqual(row["train/train_rollout_logprob_abs_diff"], 0)
            self.assertEqual(row["train/skipped_steps"], 0)
        before, after = [r["eval/addition"] for r in rows if "eval/addition" in r]
        print(f"right answers: {before:.3f} before, {after:.3f} after 10 steps; "
              f"{sum(r['perf/step_time'] for r in steps):.0f} s of steps")
        self.assertGreater(after - before, 0.3)


if __name__ == "__main__":
    unittest.main(verbosity=2)
