"""A run that is broken and continued is the unbroken run: killed at ten random moments, interrupted,
with its newest checkpoint damaged, or with a disk that is full. Metrics (clock and memory aside),
samples and the final model are compared bit for bit."""

import os
import random
import resource
import shutil
import signal
import subprocess
import time
import unittest

from tiny_run import ROOT, TANDEM, TinyRun, needs_gpus, tensors_of, wait_until

STEPS = 14  # of 4 prompts each: three passes over the 18 prompts, with borders inside steps


class Resume(TinyRun):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        done = subprocess.run([TANDEM, *map(str, cls.run_flags(cls, "unbroken"))], capture_output=True,
                              text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr

    def run_flags(self, name, *more):
        folder = self.folder / name
        return [
            *TinyRun.flags(self, name), "--prompt-data", f"{ROOT}/examples/addition/train.jsonl@[0:18]",
            "--eval-prompt-data", "addition", f"{ROOT}/examples/addition/eval.jsonl@[0:4]",
            "--eval-interval", "3", "--num-rollout", STEPS, "--lr-decay-style", "cosine",
            "--lr-warmup-iters", "3", "--use-tensorboard",
            # A reference that moves between two checkpoints.
            "--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--ref-update-interval", "5",
            "--save", folder / "checkpoints", "--load", folder / "checkpoints", "--save-interval", "2",
            "--save-keep-last", "2", "--save-hf", folder / "model", *more]

    def assert_equals_unbroken(self, name):
        self.assertEqual(self.rows(name), self.rows("unbroken"))
        for step in range(STEPS):
            path = f"rollouts/rollout_{step:07d}.safetensors"
            self.assertEqual((self.folder / name / path).read_bytes(),
                             (self.folder / "unbroken" / path).read_bytes(), path)
        path = "model/model.safetensors"
        self.assertEqual((self.folder / name / path).read_bytes(),
                         (self.folder / "unbroken" / path).read_bytes())

    def checkpoints(self, name):
        return sorted(p.name for p in (self.folder / name / "checkpoints").glob("iter_*"))

    def pointer(self, name):
        return (self.folder / name / "checkpoints/latest_checkpointed_iteration.txt").read_text()

    def break_after(self, name, rows, signal_number=signal.SIGKILL):
        """Starts or continues the run, ends it once it has that many rows more, returns its exit code."""
        before = len(self.lines(name))
        process = self.start(self.run_flags(name), f"{name}.out")
        self.wait_for_rows(name, before + rows, process)
        process.send_signal(signal_number)
        return process.wait(timeout=30)

    def test_killed_at_ten_random_moments(self):
        moments = random.Random(5)
        kills = 0
        for _ in range(10):
            before = len(self.lines("killed"))
            process = self.start(self.run_flags("killed"), "killed.out")
            if moments.random() < 0.7:  # else while it starts
                wait_until(lambda: len(self.lines("killed")) > before or process.poll() is not None)
            time.sleep(moments.uniform(0.0, 1.0))
            if process.poll() is None:
                kills += 1
                self.kill(process)
        self.run_tandem(*self.run_flags("killed"))
        print(f"killed {kills} times")
        self.assertGreaterEqual(kills, 5)
        self.assert_equals_unbroken("killed")

    def test_interrupted_twice_and_the_second_at_once(self):
        # Ctrl-C saves the last whole step, whatever --save-interval says, and the run ends in order.
        self.assertEqual(self.break_after("interrupted", 4, signal.SIGINT), 130)
        text = self.output("interrupted.out")
        self.assertIn(f"of {STEPS} steps done; --load", text)
        steps = max(row["step"] for row in self.rows("interrupted"))
        self.assertEqual(int(self.pointer("interrupted")), steps)
        # A second Ctrl-C does not wait: the signal's own end.
        process = self.start(self.run_flags("interrupted"), "interrupted.out")
        self.wait_for_rows("interrupted", len(self.lines("interrupted")) + 1, process)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        self.assertIn(process.wait(timeout=5), (-signal.SIGINT, -signal.SIGTERM, 130))
        self.run_tandem(*self.run_flags("interrupted"))
        self.assert_equals_unbroken("interrupted")

    def test_what_is_done_is_said(self):
        name = "unbroken"
        before = self.lines(name)
        flags = list(map(str, self.run_flags(name)))
        at = flags.index("--save-hf")
        out = self.run_tandem(*flags[:at], *flags[at + 2:])
        self.assertIn("nothing to do: ", out)
        self.assertIn(f"step {STEPS}, the last of --num-rollout {STEPS}", out)
        self.assertEqual(self.lines(name), before)
        # keep-last: two checkpoints, the newest that of the last step, numbered from 0 (case C53).
        self.assertEqual(self.checkpoints(name), [f"iter_{STEPS - 3:07d}", f"iter_{STEPS - 1:07d}"])
        self.assertEqual(self.pointer(name), str(STEPS - 1))

    def test_a_longer_run_goes_on_in_the_same_folder_without_being_told_where(self):
        shutil.copytree(self.folder / "unbroken", self.folder / "moved")
        flags = list(map(str, self.run_flags("moved", "--num-rollout", STEPS + 2, "--lr-decay-iters", STEPS)))
        for flag in ("--run-dir", "--save-hf"):
            at = flags.index(flag)
            del flags[at:at + 2]
        out = self.run_tandem(*flags)
        self.assertIn("data.num_rollout was 14, is 16", out)
        steps = [r["step"] for r in self.rows("moved") if "train/loss" in r]
        self.assertEqual(steps, list(range(STEPS + 2)))
        self.assertEqual(self.rows("moved")[:len(self.rows("unbroken"))], self.rows("unbroken"))
        # Rows that somebody took out are not made again, and that is said.
        path = self.folder / "moved/metrics.jsonl"
        path.write_text("".join(line for line in path.read_text().splitlines(True) if '"step":3,' not in line))
        flags[flags.index("--num-rollout", flags.index("--num-rollout") + 1) + 1] = str(STEPS + 3)
        out = self.run_tandem(*flags)
        self.assertIn(f"has rows of {STEPS + 1} of the {STEPS + 2} steps that are done", out)

    def test_damage_is_named_and_only_a_flag_takes_the_older_one(self):
        self.assertEqual(self.break_after("damaged", 9), -signal.SIGKILL)
        newest, older = (int(n[5:]) for n in reversed(self.checkpoints("damaged")))
        rank_file = self.folder / f"damaged/checkpoints/iter_{newest:07d}/rank_00000_of_00001.safetensors"
        data = bytearray(rank_file.read_bytes())
        data[-5] ^= 1
        rank_file.write_bytes(data)
        out = self.run_tandem(*self.run_flags("damaged"), code=1)
        self.assertIn(str(rank_file), out)
        self.assertIn("damaged on disk", out)
        self.assertIn(f"--ckpt-step {older}", out)
        os.remove(rank_file)
        out = self.run_tandem(*self.run_flags("damaged"), code=1)
        self.assertIn(f"{rank_file}: missing", out)
        self.assertIn(f"--ckpt-step {older}", out)
        pointer = self.folder / "damaged/checkpoints/latest_checkpointed_iteration.txt"
        pointer.unlink()
        out = self.run_tandem(*self.run_flags("damaged"), code=1)
        self.assertIn("latest_checkpointed_iteration.txt: missing", out)
        self.assertIn(f"--ckpt-step {older}", out)
        self.run_tandem(*self.run_flags("damaged", "--ckpt-step", older))
        self.assert_equals_unbroken("damaged")

    @needs_gpus(2)
    def test_a_full_disk_ends_the_run_with_the_older_checkpoint_whole(self):
        self.break_after("full", 3)
        before = self.pointer("full")
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
        # On two ranks: each says what it could not do, and neither waits for the other.
        start = time.monotonic()
        out = self.run_tandem(*self.run_flags("full", "--actor-num-gpus-per-node", "2"), code=1,
                              preexec_fn=limit)
        self.assertLess(time.monotonic() - start, 120)
        for rank in range(2):
            self.assertIn(f"rank_0000{rank}_of_00002.safetensors", out)
        self.assertIn("File too large", out)
        self.assertEqual(self.pointer("full"), before)
        self.assertEqual(list((self.folder / "full/checkpoints").glob("*.part")), [])
        self.run_tandem(*self.run_flags("full"))
        self.assert_equals_unbroken("full")

    @needs_gpus(4)
    def test_another_number_and_place_of_ranks_goes_on_with_the_same_numbers(self):
        # Four colocated ranks, three, two that train beside two that serve (the restored weights reach
        # those before the first answer: case C65), one (case C58).
        split = ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2"]
        beside = [f for f in self.run_flags("layouts", *split) if f != "--colocate"]
        for flags in (*(self.run_flags("layouts", "--actor-num-gpus-per-node", n) for n in ("4", "3")), beside):
            process = self.start(flags, "layouts.out")
            self.wait_for_rows("layouts", len(self.lines("layouts")) + 4, process)
            self.kill(process)
        self.assertEqual(self.output("layouts.out").count("the run goes on with step"), 2)
        self.run_tandem(*self.run_flags("layouts"))
        self.assert_equals_unbroken("layouts")

    def test_two_epochs_broken_at_their_border_and_in_their_midst(self):
        # Case C54: 64 rows, 16 a step, two epochs, broken after steps 4 and 6.
        flags = [*TinyRun.flags(self, "epochs"), "--prompt-data", f"{ROOT}/examples/addition/train.jsonl@[0:64]",
                 "--rollout-batch-size", "16", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "2",
                 "--num-epoch", "2", "--save-interval", "1", "--load", self.folder / "epochs"]
        at = flags.index("--num-rollout")
        del flags[at:at + 2]
        self.assertIn("num_rollout = 8 (num_epoch 2", self.run_tandem(*flags))
        shutil.copytree(self.folder / "epochs", self.folder / "epochs-whole")
        for steps in (4, 6):
            # What a run leaves that ended right then, later steps already written to its records.
            shutil.rmtree(self.folder / "epochs")
            shutil.copytree(self.folder / "epochs-whole", self.folder / "epochs")
            for id in range(steps, 8):
                shutil.rmtree(self.folder / f"epochs/checkpoints/iter_{id:07d}")
            (self.folder / "epochs/checkpoints/latest_checkpointed_iteration.txt").write_text(str(steps - 1))
            out = self.run_tandem(*flags)
            self.assertIn(f"{steps} of 8 steps are done, the run goes on with step {steps + 1}", out)
            self.assertEqual(self.rows("epochs"), self.rows("epochs-whole"))
            seen = [prompt for id in range(8) for prompt in self.prompts_of("epochs", id)]
            self.assertEqual(len(seen), 128)
            self.assertEqual(sorted(seen[:64]), sorted(set(seen)))
            self.assertEqual(sorted(seen[64:]), sorted(set(seen)))
            self.assertNotEqual(seen[:64], seen[64:])

    def prompts_of(self, name, id):
        """The prompts of a saved rollout as tuples of token ids, in order, each once."""
        _, tensors = tensors_of((self.folder / name / f"rollouts/rollout_{id:07d}.safetensors").read_bytes())
        tokens, at, prompts = tensors["tokens"], 0, {}
        for total, response, prompt in zip(tensors["total_lengths"], tensors["response_lengths"],
                                           tensors["prompt_ids"], strict=True):
            prompts[prompt] = tuple(tokens[at:at + total - response])
            at += total
        return list(prompts.values())

    def test_weights_alone_begin_a_run_of_their_own(self):
        load = self.folder / "unbroken"
        flags = TinyRun.flags(self, "tuned", "--load", load, "--finetune", "--num-rollout", "1")
        self.run_tandem(*flags)
        self.assertEqual([r["step"] for r in self.rows("tuned")], [0])
        plain = TinyRun.flags(self, "plain", "--hf-checkpoint", load / "model", "--num-rollout", "1")
        self.run_tandem(*plain)
        # The saved model in f32 is the checkpoint's master weights: the same first step.
        self.assertEqual(self.rows("tuned"), self.rows("plain"))

    def test_a_folder_without_checkpoints_is_no_silent_beginning(self):
        empty = self.folder / "empty"
        empty.mkdir()
        out = self.run_tandem(*TinyRun.flags(self, "lost", "--load", empty), code=1)
        self.assertIn("holds no checkpoint", out)
        self.assertFalse((self.folder / "lost/metrics.jsonl").exists())

    def test_two_runs_never_share_a_folder(self):
        process = self.start(self.run_flags("shared", "--num-rollout", 2000), "shared.out")
        self.wait_for_rows("shared", 2, process)
        out = self.run_tandem(*self.run_flags("shared", "--num-rollout", 2000), code=1)
        self.assertIn("another run works in", out)
        self.kill(process)


if __name__ == "__main__":
    unittest.main(verbosity=2)
