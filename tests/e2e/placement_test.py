"""Where trainer and engine live does not change a run: one rank, two colocated, split ranks, engines
of two ranks, each way of moving weights, in memory and over sockets, trainers that shard their compute
weights: the same numbers bit for bit.

With TANDEM_TEST_DEVICE=cuda in the environment on GPUs, in exact mode: the double-buffered update on one,
the placements over two where there are two."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from tiny_run import BUILD, DEVICE, DEVICE_FLAGS, NUM_GPUS, ROOT, lacks_gpus, make_model, needs_gpus

SPLIT = ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"]
SHARDED = ["--fsdp-reshard-after-forward"]
PLACEMENTS = {
    "colocated-2": ["--colocate", "--actor-num-gpus-per-node", "2"],
    "colocated-2-tp2": ["--colocate", "--actor-num-gpus-per-node", "2",
                        "--rollout-num-gpus-per-engine", "2"],
    "colocated-1-surplus": ["--colocate", "--rollout-num-gpus", "2"],
    "colocated-double": ["--colocate", "--update-weight-double-buffer"],
    # Three trainer ranks share the eight leaves of the gradient unevenly.
    "colocated-3": ["--colocate", "--actor-num-gpus-per-node", "3"],
    # No kernel cuts a sum by threads.
    "colocated-2-threads": ["--colocate", "--threads-per-rank", "2"],
    "split-1-1-3-threads": SPLIT + ["--threads-per-rank", "3"],
    "split-3-1": ["--actor-num-gpus-per-node", "3", "--rollout-num-gpus", "1"],
    # More ranks than key/value heads.
    "colocated-4-tp4": ["--colocate", "--actor-num-gpus-per-node", "4",
                        "--rollout-num-gpus-per-engine", "4"],
    "split-1-1": SPLIT,
    "split-p2p-sockets": SPLIT + ["--update-weight-transfer-mode", "p2p",
                                  "--no-update-weight-shared-memory",
                                  "--update-weight-buffer-size", "65536"],
    "split-broadcast-sockets": SPLIT + ["--no-update-weight-shared-memory"],
    "split-2-tp2-p2p": ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2",
                        "--rollout-num-gpus-per-engine", "2",
                        "--update-weight-transfer-mode", "p2p", "--update-weight-double-buffer"],
    "split-2-2-broadcast": ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2",
                            "--no-update-weight-shared-memory"],
    # Engines of different width.
    "split-1-of-2-1-p2p": ["--rollout-num-gpus-of-engines", "2", "1", "--update-weight-transfer-mode", "p2p",
                           "--no-update-weight-shared-memory"],
    "split-2-of-1-2-broadcast": ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus-of-engines", "1", "2",
                                 "--no-update-weight-shared-memory"],
    "colocated-3-of-2-1": ["--colocate", "--actor-num-gpus-per-node", "3",
                           "--rollout-num-gpus-of-engines", "2", "1"],
    # Each trainer rank keeps a part of the compute weights and gathers layers.
    "sharded-2-1": [*SHARDED, "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1"],
    "sharded-3-2-p2p-sockets": [*SHARDED, "--actor-num-gpus-per-node", "3", "--rollout-num-gpus", "2",
                                "--rollout-num-gpus-per-engine", "2", "--update-weight-transfer-mode", "p2p",
                                "--no-update-weight-shared-memory"],
    "sharded-2-2-broadcast-sockets": [*SHARDED, "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2",
                                      "--no-update-weight-shared-memory", "--gradient-checkpointing"],
}
GPU_PLACEMENTS = {
    "colocated-double": PLACEMENTS["colocated-double"],
    "colocated-2": PLACEMENTS["colocated-2"],
    "colocated-1-surplus": PLACEMENTS["colocated-1-surplus"],
    "split-broadcast": SPLIT,
    "split-p2p": SPLIT + ["--update-weight-transfer-mode", "p2p"],
    "split-p2p-double": SPLIT + ["--update-weight-transfer-mode", "p2p", "--update-weight-double-buffer"],
    "split-broadcast-nccl": SPLIT + ["--no-update-weight-shared-memory"],
    "split-p2p-nccl": SPLIT + ["--update-weight-transfer-mode", "p2p", "--no-update-weight-shared-memory",
                               "--update-weight-buffer-size", "65536"],
    "colocated-2-tp2": PLACEMENTS["colocated-2-tp2"],
    "colocated-2-tp2-double": PLACEMENTS["colocated-2-tp2"] + ["--update-weight-double-buffer"],
}
if DEVICE == "cuda":
    PLACEMENTS = {name: flags for name, flags in GPU_PLACEMENTS.items()
                  if NUM_GPUS >= 2 or name == "colocated-double"}
    DEVICE_FLAGS = [*DEVICE_FLAGS, "--deterministic-layout"]
# What depends on clock and placement: times, and which prompts met in one engine.
CLOCK = ("perf/", "memory/", "time", "rollout/prefix_cache_hit_rate", "rollout/avg_cached_tokens_per_sample")


class Placement(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="tandem-placement-"))
        cls.model = cls.folder / "tiny"
        make_model(cls.model, "--layers", "4")  # more than the slots that sharded layers pass through
        cls.wanted = cls.rows("one", ["--colocate"])

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    @classmethod
    def command(cls, name, flags, rollouts=3):
        return [BUILD / "tandem", "train", "--hf-checkpoint", cls.model,
                "--prompt-data", ROOT / "examples/addition/train.jsonl", "--input-key", "prompt",
                "--label-key", "label", "--apply-chat-template", "--rm-type", "last-number",
                "--num-rollout", rollouts, "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
                "--rollout-max-response-len", "8", "--rollout-shuffle", "--lr", "1e-3",
                "--threads-per-rank", "1", "--entropy-coef", "0.01", "--ci-test", *DEVICE_FLAGS,
                "--run-dir", cls.folder / name, *flags]

    @classmethod
    def rows(cls, name, flags, code=0, rollouts=3):
        done = subprocess.run([str(x) for x in cls.command(name, flags, rollouts)], capture_output=True, text=True,
                              timeout=300, cwd=ROOT)
        if done.returncode != code:
            raise AssertionError(f"{name}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        if code:
            return done.stdout + done.stderr
        lines = (cls.folder / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCK)}
                for line in lines]

    def test_no_placement_changes_a_bit(self):
        lacks_gpus(2, "placements over two GPUs")
        for row in self.wanted:
            self.assertEqual(row["train/train_rollout_logprob_abs_diff_max"], 0)
            self.assertGreater(row["train/grad_norm"], 0)  # a random model earns nothing: by its entropy
        for name, flags in PLACEMENTS.items():
            with self.subTest(name):
                self.assertEqual(self.rows(name, flags), self.wanted)

    @needs_gpus(2)
    def test_row_parallel_engines_differ_by_rounding_and_repeat_themselves(self):
        fast = ["--no-true-on-policy-mode"]
        two = [*fast, "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "2",
               "--rollout-num-gpus-per-engine", "2"]
        if DEVICE == "cuda":  # where trainer and engine choose their kernels apart
            runs = [("fast-2", [*fast, "--deterministic-mode", "--dtype", "float32", "--colocate",
                                "--actor-num-gpus-per-node", "2", "--rollout-num-gpus-per-engine", "2"])]
        else:
            # Of four ranks two hold each key/value head.
            runs = [("fast-2", two), ("fast-4", [*fast, *PLACEMENTS["colocated-4-tp4"]])]
        for name, flags in runs:
            with self.subTest(name):
                rows = self.rows(name, flags)
                for row in rows:
                    self.assertGreater(row["train/train_rollout_logprob_abs_diff_max"], 0)
                    self.assertLess(row["train/train_rollout_logprob_abs_diff_max"], 1e-4)
                if DEVICE == "cuda":
                    continue  # what follows holds where one dtype and one set of kernels serve both
                self.assertAlmostEqual(rows[0]["train/grad_norm"], self.wanted[0]["train/grad_norm"],
                                       delta=1e-3 * self.wanted[0]["train/grad_norm"])
                self.assertEqual(rows, self.rows(f"{name}-again", flags))
        if DEVICE == "cuda":
            return
        # An engine of one rank cuts nothing.
        self.assertEqual(self.rows("fast-1", [*fast, "--colocate"]), self.wanted)

    @needs_gpus(2)
    def test_the_cost_of_an_update_stands_in_the_row(self):
        self.rows("cost", SPLIT)
        for line in (self.folder / "cost/metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            self.assertGreater(row["perf/update_weights_bytes"], 0)
            for part in ("announce", "move", "verify", "swap"):
                self.assertGreaterEqual(row[f"perf/update_weights_{part}_time"], 0)

    @unittest.skipIf(DEVICE == "cuda", "not run: trainers on GPUs hold all compute weights")
    def test_a_sharded_trainer_goes_on_from_its_checkpoint_with_its_reference(self):
        # A reference that moves after each rollout is state: its shards go into the checkpoint, whatever
        # the number of ranks that write or read it.
        def flags(name, ranks, *more):
            return [*more, "--actor-num-gpus-per-node", str(ranks), "--rollout-num-gpus", "1", "--use-kl-loss",
                    "--kl-loss-coef", "0.1", "--ref-update-interval", "1", "--num-steps-per-rollout", "2",
                    "--save", str(self.folder / name / "c"), "--load", str(self.folder / name / "c"),
                    "--save-hf", str(self.folder / name / "model"), "--dtype", "bfloat16"]
        wanted = self.rows("resident", flags("resident", 1))
        self.rows("resharded", flags("resharded", 2, *SHARDED), rollouts=1)
        self.rows("resharded", flags("resharded", 3, *SHARDED), rollouts=2)
        self.assertEqual(self.rows("resharded", flags("resharded", 2)), wanted)
        path = "model/model.safetensors"
        self.assertEqual((self.folder / "resharded" / path).read_bytes(),
                         (self.folder / "resident" / path).read_bytes())

    def children_of(self, parent):
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if int(stat[1]) == parent and len(words) > 1 and words[1] == b"rank":
                found[int(entry.name)] = words
        return sorted(found)  # ranks are started in order

    @needs_gpus(2)
    def test_a_killed_engine_part_ends_the_run_with_the_cause(self):
        for name, flags, victim in [
                ("kill-engine", SPLIT, 1),
                ("kill-follower", ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2"], 2),
                ("kill-follower-colocated", ["--colocate", "--actor-num-gpus-per-node", "2",
                                             "--rollout-num-gpus-per-engine", "2"], 1),
                ("kill-shard", [*SHARDED, "--actor-num-gpus-per-node", "3", "--rollout-num-gpus", "1"], 1)]:
            if name == "kill-follower" and lacks_gpus(3, name):
                continue
            if name == "kill-shard" and DEVICE == "cuda":
                continue  # trainers on GPUs hold all compute weights
            with self.subTest(name), open(self.folder / f"{name}.out", "w") as log:
                driver = subprocess.Popen(
                    [str(x) for x in self.command(name, flags, rollouts=2000)], stdout=log, stderr=log,
                    cwd=ROOT, start_new_session=True)
                metrics = self.folder / name / "metrics.jsonl"
                deadline = time.monotonic() + 120
                while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
                    self.assertIsNone(driver.poll())
                    time.sleep(0.1)
                ranks = self.children_of(driver.pid)
                os.kill(ranks[victim], signal.SIGKILL)
                self.assertEqual(driver.wait(timeout=60), 1)
                text = (self.folder / f"{name}.out").read_text()
                self.assertIn(f"rank {victim} ", text)
                self.assertIn("killed by signal 9", text)
                for pid in ranks:
                    self.assertFalse(os.path.exists(f"/proc/{pid}"))

    def test_impossible_placements_are_refused_before_anything_starts(self):
        for code, flags, part in [
                (2, [], "--rollout-num-gpus: not given"),
                (2, ["--colocate", "--update-weight-transfer-mode", "p2p"], "the copy is in place"),
                (2, SPLIT + ["--update-weight-transfer-mode", "disk"], "broadcast or p2p"),
                (2, ["--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"],
                 "cannot be cut into engines of 2"),
                (2, ["--colocate", *SHARDED], "so every rank holds all of them"),
                (2, ["--rollout-num-gpus", "2", "--rollout-num-gpus-of-engines", "2", "1"],
                 "found 2 1, together 3; numbers from 1 wanted that are together --rollout-num-gpus (2)"),
                (1, ["--rollout-num-gpus-of-engines", "1", "3"], "--rollout-num-gpus-of-engines: "),
                (2, ["--colocate", "--async-steps", "1"], "trainer and engine take turns"),
                (2, ["--colocate", "--update-weights-interval", "2"], "every step updates them"),
                (1, ["--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "3"],
                 "num_attention_heads 4, intermediate_size 80, num_key_value_heads 2 cannot be shared "
                 "evenly by them; 1, 2, 4 fit"),
                (1, ["--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "8",
                     "--no-true-on-policy-mode"],
                 "num_attention_heads 4 cannot be shared evenly by them; 1, 2, 4 fit"),
                (1, SPLIT + ["--num-gpus-per-node", "1"], "2 ranks wanted")]:
            given = {"--rollout-num-gpus": flags[1:2], "--rollout-num-gpus-of-engines": flags[1:3]}
            ranks = 1 + sum(map(int, given.get(flags[0], []))) if code == 1 else 0
            if DEVICE == "cuda" and ranks > NUM_GPUS:  # told first, since no width helps there
                part = f"{ranks} ranks wanted (1 trainer, {ranks - 1} engine), {NUM_GPUS} GPUs there"
                flags = [*flags, "--num-gpus-per-node", "16"]  # a promise that the machine does not keep
            with self.subTest(part):
                text = self.rows("refused", flags, code=code)
                self.assertIn(part, text)
                self.assertFalse((self.folder / "refused/metrics.jsonl").exists())


if __name__ == "__main__":
    unittest.main(verbosity=2)
