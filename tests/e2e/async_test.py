"""--async-steps 1: the next rollout is generated while the present one is trained on. What is claimed:
answers are one weight version old and said to be, the correction is on, a broken and continued run is
the unbroken one bit for bit, and faults end it as they end a synchronous run. And the ways of updating
weights while answers are being written."""

import json
import os
import re
import signal
import unittest

from tiny_run import ROOT, TinyRun, children, lacks_gpus, needs_gpus, wait_until

STEPS = 8


@needs_gpus(2)
class Async(TinyRun):
    def flags(self, name, *more):
        flags = [f for f in super().flags(name) if f != "--colocate"]
        # A random model earns nothing; the entropy moves its weights.
        return [*flags, "--num-rollout", STEPS, "--rollout-num-gpus", "1", "--async-steps", "1",
                "--entropy-coef", "0.01", "--ci-test", *more]

    def steps(self, name):
        return [row for row in self.rows(name) if "train/loss" in row]

    def test_answers_are_one_version_old_and_corrected_for(self):
        out = self.run_tandem(*self.flags("ahead", "--eval-prompt-data", "addition",
                                          f"{ROOT}/examples/addition/eval.jsonl@[0:4]",
                                          "--eval-interval", "3"))
        self.assertIn("use_tis = true (async_steps: answers come from older weights)", out)
        steps = self.steps("ahead")
        self.assertEqual([row["step"] for row in steps], list(range(STEPS)))
        for row in steps:
            # Rollout 0 and 1 were written by version 1, rollout k by version k.
            self.assertEqual(row["rollout/weight_version/min"], max(1, row["step"]))
            self.assertEqual(row["rollout/weight_version/max"], max(1, row["step"]))
            self.assertEqual(row["rollout/staleness/max"], 0 if row["step"] == 0 else 1)
            on_policy = row["train/on_policy_samples"]
            self.assertEqual(on_policy, 16 if row["step"] == 0 else 0)
            if row["step"] == 0:
                self.assertEqual(row["train/train_rollout_logprob_abs_diff_max"], 0)
                self.assertEqual(row["train/first_batch_logprob_abs_diff"], 0)
                self.assertEqual(row["train/tis"], 1)
            else:
                # Rollout 1 was begun with the weights of rollout 0.
                self.assertEqual(row.get("train/first_batch_logprob_abs_diff"), None if row["step"] == 1
                                 else row["train/off_policy_logprob_abs_diff"])
                self.assertNotIn("train/train_rollout_logprob_abs_diff", row)
                self.assertEqual(row["train/off_policy_logprob_abs_diff"],
                                 row["train/off_policy_logprob_abs_diff/lag_1"])
        self.assertTrue(any(row.get("train/off_policy_logprob_abs_diff", 0) > 0 for row in steps))
        self.assertEqual(len([r for r in self.rows("ahead") if "eval/addition" in r]), 4)

    def test_the_schedule_is_the_only_difference(self):
        # With weights that do not move a rollout does not know when it was made.
        still = ["--lr", "0", "--no-use-tis", "--use-rollout-logprobs"]
        self.run_tandem(*self.flags("still", *still))
        sync = self.flags("sync", *still)
        self.run_tandem(*sync[:sync.index("--async-steps")], *sync[sync.index("--async-steps") + 2:])

        def numbers(name):
            return [{k: v for k, v in row.items() if not re.search("version|staleness|policy|logprob_abs", k)}
                    for row in self.rows(name)]
        self.assertEqual(numbers("still"), numbers("sync"))

    def save_flags(self, name, *more):
        folder = self.folder / name
        return self.flags(name, "--save", folder / "checkpoints", "--load", folder / "checkpoints",
                          "--save-interval", "2", "--save-hf", folder / "model", *more)

    def assert_equal_runs(self, a, b):
        self.assertEqual(self.rows(a), self.rows(b))
        files = [f"rollouts/rollout_{step:07d}.safetensors" for step in range(STEPS)]
        for path in [*files, "model/model.safetensors"]:
            self.assertEqual((self.folder / a / path).read_bytes(), (self.folder / b / path).read_bytes(),
                             path)

    def test_a_broken_run_continues_to_the_same_end(self):
        self.run_tandem(*self.save_flags("unbroken"))
        for name, number, code in (("killed", signal.SIGKILL, -9), ("interrupted", signal.SIGINT, 130)):
            with self.subTest(name):
                for rows in (1, 3):
                    process = self.start(self.save_flags(name), f"{name}.out")
                    self.wait_for_rows(name, len(self.lines(name)) + rows, process)
                    process.send_signal(number)
                    self.assertEqual(process.wait(timeout=60), code, self.output(f"{name}.out"))
                self.run_tandem(*self.save_flags(name))
                self.assert_equal_runs(name, "unbroken")
        # The checkpoint of the last step has nothing ahead of it, those before have.
        ahead = sorted(p.parent.name for p in (self.folder / "unbroken/checkpoints").glob("*/rollout_ahead*"))
        self.assertEqual(ahead, ["iter_0000001", "iter_0000003", "iter_0000005"])

    def test_a_rollout_ahead_is_trained_on_also_without_async_steps(self):
        flags = [f for f in self.save_flags("onward", "--num-rollout", "4") if f != "--ci-test"]
        self.run_tandem(*flags)
        at = flags.index("--async-steps")
        out = self.run_tandem(*flags[:at], *flags[at + 2:], "--ckpt-step", "1")
        self.assertIn("step 3: its rollout comes from the checkpoint and was written by older weights", out)
        self.assertEqual([row["rollout/staleness/max"] for row in self.steps("onward")[2:]], [1, 0])

    def test_a_damaged_rollout_ahead_is_named(self):
        self.run_tandem(*self.save_flags("damaged", "--num-rollout", "4"))
        path = self.folder / "damaged/checkpoints/iter_0000001/rollout_ahead.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        out = self.run_tandem(*self.save_flags("damaged", "--ckpt-step", "1"), code=1)
        self.assertIn(f"{path}: checksum", out)

    def test_a_killed_rank_ends_the_run_with_the_cause(self):
        for victim in (0, 1):  # trainer, engine
            with self.subTest(victim):
                name = f"kill-{victim}"
                driver = self.start(self.flags(name, "--num-rollout", "2000"), f"{name}.out")
                self.wait_for_rows(name, 2, driver)
                ranks = sorted(pid for pid, words in children(driver.pid) if words[1:2] == ["rank"])
                os.kill(ranks[victim], signal.SIGKILL)
                self.assertEqual(driver.wait(timeout=30), 1)
                text = self.output(f"{name}.out")
                self.assertIn(f"rank {victim} ", text)
                self.assertIn("killed by signal 9", text)
                self.assertTrue(wait_until(lambda: not any(os.path.exists(f"/proc/{p}") for p in ranks), 5))

    def test_weights_that_arrive_while_answers_are_written(self):
        # One answer at a time and slow draws: the trainer is ready before the rollout is.
        for mode in ("retract", "in_place", "abort"):
            with self.subTest(mode):
                self.run_tandem(*self.flags(
                    mode, "--update-weights-in-flight", "--pause-generation-mode", mode,
                    "--rollout-max-response-len", "48", "--rollout-batch-size", "2", "--num-rollout", "3",
                    "--max-running-requests", "1", "--rollout-top-p", "0.9"))
                steps = self.steps(mode)
                self.assertEqual(len(steps), 3)
                mixed = [row["rollout/weight_version/mixed_version_ratio"] for row in steps]
                print(mode, "mixed versions:", mixed, "on policy:",
                      [row["train/on_policy_samples"] for row in steps])
                for row in steps:
                    self.assertLessEqual(row["rollout/staleness/max"], 1)
                    self.assertLessEqual(row["rollout/weight_version/max"], row["step"] + 1)
                if mode == "abort":  # begun anew, so of one version
                    self.assertEqual(max(mixed), 0)
                else:
                    self.assertGreater(max(mixed), 0)

    def test_engines_with_a_second_copy_go_on_while_weights_move(self):
        # tests/unit/rank_update_test.cpp makes a move take as long as it wants; here it takes what it takes.
        for name, flags in (("aside", []), ("aside-wide", [
                "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2",
                "--update-weight-transfer-mode", "p2p", "--no-update-weight-shared-memory",
                "--pause-generation-mode", "in_place"])):
            if name == "aside-wide" and lacks_gpus(3, name):
                continue
            with self.subTest(name):
                self.run_tandem(*self.flags(
                    name, "--update-weights-in-flight", "--update-weight-double-buffer",
                    "--rollout-max-response-len", "48", "--rollout-batch-size", "2", "--num-rollout", "4",
                    "--max-running-requests", "1", "--rollout-top-p", "0.9", *flags))
                steps = self.steps(name)
                mixed = [row["rollout/weight_version/mixed_version_ratio"] for row in steps]
                print(name, "mixed versions:", mixed, "tokens during moves:",
                      [json.loads(line).get("perf/update_weights_decoded_tokens") for line in self.lines(name)])
                self.assertGreater(max(mixed), 0)
                for row in steps:
                    self.assertLessEqual(row["rollout/staleness/max"], 1)
                    if row["train/on_policy_samples"]:
                        self.assertEqual(row["train/train_rollout_logprob_abs_diff_max"], 0)

    def first_batches(self, name):
        return [row["step"] for row in self.steps(name) if "train/first_batch_logprob_abs_diff" in row]

    def test_updates_at_an_interval(self):
        self.run_tandem(*self.flags("interval", "--update-weights-interval", "3"))
        versions = [row["rollout/weight_version/max"] for row in self.steps("interval")]
        self.assertEqual(versions, [1, 1, 1, 1, 4, 4, 4, 7])
        self.assertEqual(self.first_batches("interval"), [0, 4, 7])
        self.assertEqual(max(row["rollout/staleness/max"] for row in self.steps("interval")), 3)
        flags = self.flags("sync-interval", "--update-weights-interval", "2")
        at = flags.index("--async-steps")
        self.run_tandem(*flags[:at], *flags[at + 2:])
        versions = [row["rollout/weight_version/max"] for row in self.steps("sync-interval")]
        self.assertEqual(versions, [1, 1, 3, 3, 5, 5, 7, 7])
        self.assertEqual(self.first_batches("sync-interval"), [0, 2, 4, 6])
        out = self.run_tandem(*self.flags("odd", "--update-weights-interval", "2", "--save-interval", "3"),
                              code=2)
        self.assertIn("--save-interval: found 3 with update_weights_interval 2", out)


if __name__ == "__main__":
    unittest.main(verbosity=2)
