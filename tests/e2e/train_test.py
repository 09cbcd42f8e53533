"""The real program on a tiny random model: a whole run with all its files, the same run twice, the
same run under another engine limit, a perturbed kernel, a killed rank, and faulty command lines.

With TANDEM_TEST_DEVICE=cuda in the environment on a GPU: in exact mode all of it, and one run in fast
mode, where the gap is small and not 0."""

import os
import shutil
import signal
import time
import unittest

from tiny_run import DEVICE, ROOT, TinyRun, children


class Train(TinyRun):
    def test_a_run_leaves_its_records_and_repeats_bit_for_bit(self):
        evaluation = ["--eval-prompt-data", "addition", f"{ROOT}/examples/addition/eval.jsonl@[0:8]"]
        saved = self.folder / "saved"
        out = self.run_tandem(*self.flags("a", *evaluation, "--save-hf", saved))
        for text in ("step 1/3", "gap 0", "evaluation 'addition'", "run folder: "):
            self.assertIn(text, out)
        rows = self.rows("a")
        steps = [r for r in rows if "train/loss" in r]
        self.assertEqual([r["step"] for r in steps], [0, 1, 2])
        for row in steps:
            self.assert_gap(row)
            self.assertGreater(row["train/grad_norm"], 0 if row["rollout/zero_std/count"] < 4 else -1)
        self.assertEqual(len([r for r in rows if "eval/addition" in r]), 2)
        for path in ("config.json", "log.txt", "logs/rank_0.log", "rollouts/rollout_0000002.safetensors"):
            self.assertTrue((self.folder / "a" / path).exists(), path)
        for path in ("config.json", "tokenizer.json", "chat_template.jinja"):
            self.assertEqual((saved / path).read_bytes(), (self.model / path).read_bytes())
        self.assertTrue((saved / "model.safetensors").exists())

        # Again, with an engine that runs three samples at a time and prefills in pieces.
        self.run_tandem(*self.flags("b", *evaluation, "--max-running-requests", "3",
                                    "--max-prefill-tokens", "20"))
        self.assertEqual(rows, self.rows("b"))
        for step in range(3):
            path = f"rollouts/rollout_{step:07d}.safetensors"
            self.assertEqual((self.folder / "a" / path).read_bytes(),
                             (self.folder / "b" / path).read_bytes())
        # And with one that knows no prefixes.
        self.run_tandem(*self.flags("b2", *evaluation, "--sglang-disable-radix-cache"))
        self.assertEqual(rows, self.rows("b2"))
        self.run_tandem(*self.flags("c", *evaluation, "--seed", "7"))
        self.assertNotEqual(rows, self.rows("c"))

    def test_in_bf16_the_gap_is_zero_too(self):
        self.run_tandem(*self.flags("bf16", "--dtype", "bfloat16", "--threads-per-rank", "2"))
        for row in self.rows("bf16"):
            self.assert_gap(row)

    def test_a_reference_model_and_an_entropy_bonus(self):
        self.run_tandem(*self.flags("kl", "--use-kl-loss", "--kl-loss-coef", "0.05", "--kl-loss-type", "k3",
                                    "--entropy-coef", "0.01", "--num-steps-per-rollout", "2", "--use-tis"))
        rows = self.rows("kl")
        # Equal weights in the first step, equal bits (the two means add in different orders where
        # there is one leaf); afterwards the actor moves away.
        self.assertAlmostEqual(rows[0]["rollout/ref_log_probs"], rows[0]["rollout/log_probs"], places=12)
        self.assertGreater(rows[2]["train/kl_loss"], 0)
        for row in rows:
            self.assertEqual(row["train/train_rollout_logprob_abs_diff_max"], 0)
            self.assertEqual(row["train/tis"], 1)
            self.assertGreater(row["train/entropy_loss"], 0)
            self.assertAlmostEqual(row["train/loss"], row["train/pg_loss"] + 0.05 * row["train/kl_loss"]
                                   - 0.01 * row["train/entropy_loss"], places=6)
        # The other reward: raw and as the advantage (case C09).
        self.assertIn("rollout/raw_reward", rows[0])
        self.assertIn("rollout/rewards", rows[0])

        self.run_tandem(*self.flags("moving", "--use-kl-loss", "--ref-update-interval", "1",
                                    "--ref-load", self.model))
        self.assertEqual([row["train/kl_loss"] for row in self.rows("moving")], [0, 0, 0])

    def test_reinforce_plus_plus_with_the_kl_in_the_reward(self):
        self.run_tandem(*self.flags("rpp", "--advantage-estimator", "reinforce_plus_plus",
                                    "--normalize-advantages", "--kl-coef", "0.1",
                                    "--entropy-coef", "0.01"))  # moves the weights without a reward
        rows = self.rows("rpp")
        self.assertEqual(rows[0]["rollout/kl"], 0)
        self.assertNotEqual(rows[2]["rollout/kl"], 0)
        self.assertEqual(rows[0]["train/train_rollout_logprob_abs_diff_max"], 0)

    def test_the_gap_is_zero_however_tokens_are_drawn(self):
        self.run_tandem(*self.flags("cut", "--rollout-temperature", "0.8", "--rollout-top-p", "0.9",
                                    "--rollout-top-k", "40", "--rollout-stop", "a", "7",
                                    "--mask-truncated-samples", "--rollout-max-response-len", "3"))
        rows = self.rows("cut")
        for row in rows:
            self.assertEqual(row["train/train_rollout_logprob_abs_diff_max"], 0)
        # Some answers ended at a stop text, some at the limit; those are not trained.
        self.assertLess(min(row["rollout/truncated_ratio"] for row in rows), 1)
        self.assertTrue(any(row["rollout/response_len/min"] == 0 for row in rows))

    @unittest.skipIf(DEVICE == "cuda", "not run: on a GPU bf16 weights of 1e30 leave logits of 0")
    def test_weights_that_ran_away_end_the_run_with_the_cause(self):
        out = self.run_tandem(*self.flags("away", "--lr", "3e38", "--entropy-coef", "1"), code=1)
        self.assertIn("logits are not finite; if `tandem selftest` says the same", out)
        self.assertIn("lower --lr", out)
        self.assertEqual(len(self.rows("away")), 1)

    def test_a_perturbed_kernel_shows_in_the_gap(self):
        for side in ("engine", "trainer"):
            self.run_tandem(*self.flags(f"perturbed-{side}", "--debug-perturb-kernel", side))
            for row in self.rows(f"perturbed-{side}"):
                self.assertGreater(row["train/train_rollout_logprob_abs_diff_max"], 0)

    @unittest.skipIf(DEVICE == "cpu", "not run: fast mode is a GPU's")
    def test_in_fast_mode_the_gap_is_small(self):
        self.run_tandem(*self.flags("fast", "--no-true-on-policy-mode"))
        for row in self.rows("fast"):
            self.assertLess(row["train/train_rollout_logprob_abs_diff_max"], 0.1)
            self.assertGreater(row["train/train_rollout_logprob_abs_diff_max"], 0)

    def assert_gap(self, row):
        self.assertEqual(row["train/train_rollout_logprob_abs_diff_max"], 0)
        self.assertEqual(row["train/train_rollout_logprob_abs_diff"], 0)

    def start_and_find_rank(self, name):
        driver = self.start(self.flags(name, "--num-rollout", "2000"), f"{name}.out")
        self.wait_for_rows(name, 1, driver)
        self.assertIsNone(driver.poll(), self.output(f"{name}.out"))
        ranks = [pid for pid, words in children(driver.pid) if words[1:2] == ["rank"]]
        self.assertEqual(len(ranks), 1)
        return driver, ranks[0]

    def test_a_killed_rank_ends_the_run_with_the_cause(self):
        driver, rank = self.start_and_find_rank("killed-rank")
        os.kill(rank, signal.SIGKILL)
        self.assertEqual(driver.wait(timeout=20), 1)
        text = self.output("killed-rank.out")
        self.assertIn("rank 0", text)
        self.assertIn("killed by signal 9", text)

    def test_a_killed_driver_leaves_nothing(self):
        driver, rank = self.start_and_find_rank("killed-driver")
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and os.path.exists(f"/proc/{rank}"):
            time.sleep(0.05)
        self.assertFalse(os.path.exists(f"/proc/{rank}"))

    def test_all_faults_of_a_command_line_come_at_once(self):
        out = self.run_tandem("train", "--hf-checkpoint", "nowhere", "--rollout-batch-size", "0",
                              "--rollout-temprature", "1", "--use-opd", "--lr", "fast", code=2)
        for text in ("nowhere", "--rollout-batch-size", "--rollout-temperature", "--use-opd", "fast"):
            self.assertIn(text, out)

    def test_faults_that_would_cost_a_run_show_before_it(self):
        out = self.run_tandem(*self.flags("lost", "--save-hf", ROOT / "examples/addition"), code=1)
        self.assertIn("not a model folder", out)
        shutil.rmtree(self.folder / "lost")
        out = self.run_tandem(*self.flags("lost", "--save-hf", self.model), code=1)
        self.assertIn("--save-hf", out)
        shutil.rmtree(self.folder / "lost")
        out = self.run_tandem(*self.flags("lost", "--kv-cache-tokens", "32"), code=1)
        self.assertIn("--kv-cache-tokens", out)
        shutil.rmtree(self.folder / "lost")
        self.run_tandem(*self.flags("lost", "--num-rollout", "1"))
        before = (self.folder / "lost/metrics.jsonl").read_bytes()
        out = self.run_tandem(*self.flags("lost"), code=1)
        self.assertIn("already holds a run", out)
        self.assertEqual((self.folder / "lost/metrics.jsonl").read_bytes(), before)

    def test_a_damaged_model_is_refused_before_anything_runs(self):
        broken = self.folder / "broken"
        shutil.copytree(self.model, broken)
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        out = self.run_tandem(*self.flags("broken-run", "--hf-checkpoint", broken), code=1)
        self.assertIn("model.safetensors", out)
        self.assertFalse((self.folder / "broken-run" / "metrics.jsonl").exists()
                         and (self.folder / "broken-run" / "metrics.jsonl").read_text())


if __name__ == "__main__":
    unittest.main(verbosity=2)
