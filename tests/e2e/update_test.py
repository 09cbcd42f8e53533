"""Weight updates that fail: the run ends with tensor, rank and reason, within its limits, and leaves no
process and no shared memory; and --ci-test, which fails when a side computes something else."""

import os
import pathlib
import time
import unittest

from tiny_run import TinyRun, children, lacks_gpus, needs_gpus, wait_until

SPLIT = ["--rollout-num-gpus", "1"]


def shared_memory():
    return sorted(os.listdir("/dev/shm")) if pathlib.Path("/dev/shm").exists() else []


class Update(TinyRun):
    def split_flags(self, name, *more):
        return [*[f for f in self.flags(name) if f != "--colocate"], *SPLIT, "--entropy-coef", "0.01", *more]

    def broken(self, name, how, *more):
        """Output of a run whose third update breaks; what it started is gone."""
        before = shared_memory()
        process = self.start(self.split_flags(name, "--debug-break-update", how, *more), f"{name}.out")
        found = []

        def ended():
            found.extend(pid for pid, words in children(process.pid) if pid not in found)
            return process.poll() is not None
        self.assertTrue(wait_until(ended, 60))
        self.assertEqual(process.returncode, 1, self.output(f"{name}.out"))
        self.assertGreaterEqual(len(found), 3)  # two ranks and the tokenizer
        self.assertTrue(wait_until(lambda: not any(os.path.exists(f"/proc/{p}") for p in found), 5))
        self.assertEqual(shared_memory(), before)
        # The update that broke is the one after the second step, whose row is not written.
        self.assertEqual(len(self.lines(name)), 1)
        return self.output(f"{name}.out")

    @needs_gpus(2)
    def test_a_weight_that_arrives_changed(self):
        for name, flags in (("memory", []), ("sockets", ["--no-update-weight-shared-memory"]),
                            ("p2p", ["--no-update-weight-shared-memory", "--update-weight-transfer-mode", "p2p"]),
                            ("double", ["--update-weight-double-buffer"])):
            with self.subTest(name):
                text = self.broken(name, "corrupt", *flags)
                self.assertRegex(text, "weight update 3: model.embed_tokens.weight: checksum [0-9a-f]{16} at "
                                       "trainer rank 0, [0-9a-f]{16} at engine rank 1; the engine did not swap")

    @needs_gpus(2)
    def test_a_rank_that_dies_in_the_middle_of_a_move(self):
        for name, flags in (("die-memory", []), ("die-sockets", ["--no-update-weight-shared-memory"]),
                            ("die-p2p", ["--no-update-weight-shared-memory", "--update-weight-transfer-mode", "p2p",
                                         "--update-weight-double-buffer"]),
                            ("die-wide", ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2",
                                          "--no-update-weight-shared-memory"])):
            if name == "die-wide" and lacks_gpus(3, name):
                continue
            with self.subTest(name):
                start = time.monotonic()
                text = self.broken(name, "die", *flags)
                self.assertLess(time.monotonic() - start, 40)
                self.assertIn(f"rank {2 if name == 'die-wide' else 1} ", text)
                self.assertIn("killed by signal 9", text)

    @needs_gpus(2)
    def test_a_move_that_never_ends(self):
        text = self.broken("hang", "hang", "--control-timeout-seconds", "4")
        self.assertRegex(text, "/weights/move: no answer within .*4")

    def test_what_is_served_is_compared_also_after_a_resume(self):
        for name, gpus, flags in (("equal-one", 1, ["--colocate"]),
                                  ("equal-two", 2, ["--colocate", "--actor-num-gpus-per-node", "2",
                                                    "--rollout-num-gpus-per-engine", "2"]),
                                  ("equal-split", 3, [*SPLIT, "--actor-num-gpus-per-node", "2"])):
            if lacks_gpus(gpus, name):
                continue
            with self.subTest(name):
                common = [*[f for f in self.flags(name) if f != "--colocate"], *flags,
                          "--entropy-coef", "0.01", "--check-weight-update-equal", "--dtype", "bfloat16",
                          "--save", self.folder / name / "c", "--load", self.folder / name / "c"]
                self.run_tandem(*common, "--num-rollout", "2")
                self.run_tandem(*common, "--num-rollout", "4")
                self.assertEqual(len(self.lines(name)), 4)
        # In place nothing moves, so only this check can see a changed weight.
        out = self.run_tandem(*self.flags("changed", "--check-weight-update-equal",
                                          "--debug-break-update", "corrupt"), code=1)
        self.assertIn("weight check: version 3: model.embed_tokens.weight: engine rank 0 serves", out)

    def test_the_ci_test_fails_where_a_kernel_differs(self):
        for side in ("engine", "trainer"):
            with self.subTest(side):
                out = self.run_tandem(*self.flags(f"ci-{side}", "--ci-test", "--debug-perturb-kernel", side),
                                      code=1)
                self.assertRegex(out, "--ci-test: step 1, weight version 1:\n *"
                                      "train/train_rollout_logprob_abs_diff_max = [0-9.e-]+ over 16 samples")
        # The perturbed trainer is no longer its reference.
        out = self.run_tandem(*self.flags("ci-reference", "--ci-test", "--ci-disable-logprobs-checker",
                                          "--use-kl-loss", "--debug-perturb-kernel", "trainer"), code=1)
        self.assertIn("train/kl_loss = ", out)
        # And each part can be left out.
        self.run_tandem(*self.flags("ci-off", "--ci-test", "--ci-disable-logprobs-checker",
                                    "--ci-disable-kl-checker", "--ci-disable-weight-update-checker",
                                    "--use-kl-loss", "--debug-perturb-kernel", "trainer"))

    def test_the_ci_test_passes_with_all_that_a_step_can_have(self):
        self.run_tandem(*self.flags("ci", "--ci-test", "--use-kl-loss", "--kl-loss-coef", "0.05",
                                    "--num-steps-per-rollout", "2", "--use-tis", "--entropy-coef", "0.01",
                                    "--max-tokens-per-gpu", "80"))
        for row in self.rows("ci"):
            self.assertEqual(row["train/on_policy_samples"], 16)


if __name__ == "__main__":
    unittest.main(verbosity=2)
