"""What a run says before, during and after: the dry run, the memory ledger, recorded rollouts that are
trained on again, and `tandem inspect`."""

import json
import shutil
import subprocess
import time
import unittest

from tiny_run import DEVICE, HIDDEN, MODEL, ROOT, TANDEM, TinyRun, make_model


FUNCTION = ["--custom-rm-path", "examples.addition.functions.reward", "--reward-key", "score"]


class Records(TinyRun):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.run_once(cls, "long", *FUNCTION, "--num-rollout", "50", "--save-interval", "25",
                     "--save-debug-rollout-data", cls.folder / "recorded/{rollout_id}.safetensors",
                     "--eval-prompt-data", "addition", f"{ROOT}/examples/addition/eval.jsonl@[0:4]")

    def run_once(self, name, *flags):
        done = subprocess.run([TANDEM, *map(str, TinyRun.flags(self, name, *flags))], cwd=ROOT,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_memory_does_not_grow(self):
        rows = [json.loads(line) for line in self.lines("long")]
        steps = [row for row in rows if "perf/step_time" in row]
        self.assertEqual(len(steps), 50)
        for name in ("memory/rank_rollout_bytes", "memory/rank_train_bytes", "memory/rank_update_bytes",
                     "memory/driver_bytes", "memory/helper_bytes"):
            # The least of five steps: whether free pages have gone back by the moment of asking is chance.
            early, late = (min(row[name] for row in steps[i:i + 5]) for i in (4, 45))
            print(f"{name}: {early / 2**20:.1f} MiB after step 5, {late / 2**20:.1f} after step 50")
            self.assertGreater(early, 1 << 20)
            self.assertLessEqual(late - early, max(0.01 * early, 8e6), name)
            if name.startswith("memory/rank"):
                self.assertGreaterEqual(steps[49][name.replace("_bytes", "_peak_bytes")], steps[49][name])

    def test_recorded_rollouts_are_trained_on_again(self):
        recorded = self.folder / "recorded/{rollout_id}.safetensors"
        self.run_tandem(*self.flags("replayed", "--num-rollout", "4", "--load-debug-rollout-data", recorded,
                                    "--lr-decay-iters", "50"))
        # Not recorded: the other numbers of a reward object, what was drawn, and which update came before.
        unknown = ("rollout/reward/", "rollout/num_prompts", "train/first_batch_")
        first = [{k: v for k, v in r.items() if not k.startswith(unknown)}
                 for r in self.rows("long") if "train/loss" in r]
        self.assertEqual(self.rows("replayed"), first[:4])
        # The run's own folder has the same files under Miles's kind of pattern.
        kept = self.folder / "long/rollouts/rollout_{rollout_id:07d}.safetensors"
        self.run_tandem(*self.flags("kept", "--num-rollout", "2", "--debug-train-only",
                                    "--load-debug-rollout-data", kept))
        self.assertEqual(self.rows("kept"), first[:2])
        # Another number of samples is trained on, and said; a recording that is missing ends it at once.
        out = self.run_tandem(*self.flags("more", "--num-rollout", "1", "--n-samples-per-prompt", "2",
                                          "--load-debug-rollout-data", recorded))
        self.assertIn("step 1: 16 recorded samples are trained on, the flags would generate 8", out)
        out = self.run_tandem(*self.flags("short", "--num-rollout", "51", "--load-debug-rollout-data", recorded), code=1)
        self.assertIn("recorded/50.safetensors does not exist, and --num-rollout 51 asks for", out)
        self.assertEqual(self.lines("short"), [])
        # Generation alone: the first rollout, then the same weights again.
        self.run_tandem(*self.flags("generated", "--num-rollout", "2", "--debug-rollout-only"))
        rows = self.rows("generated")
        self.assertEqual(rows[0]["rollout/raw_reward"], first[0]["rollout/raw_reward"])
        self.assertFalse([key for row in rows for key in row if key.startswith("train/")])
        path = "rollouts/rollout_0000000.safetensors"
        self.assertEqual((self.folder / "generated" / path).read_bytes(),
                         (self.folder / "long" / path).read_bytes())
        out = self.run_tandem(*self.flags("none", "--load-debug-rollout-data", self.folder / "x{rollout_id}"),
                              code=2)
        self.assertIn("--load-debug-rollout-data", out)

    def test_inspect(self):
        checkpoint = self.folder / "long/checkpoints/iter_0000049"
        cases = [
            (self.folder / "long", ["50 of 50", "rollout/raw_reward", "eval/addition", "50 files",
                                    "iter_0000024: whole", "goes on from", "iter_0000049"]),
            (self.folder / "long/rollouts/rollout_0000003.safetensors",
             ["16 samples of 4 prompts", "weight version", "answer:", "label:"]),
            (self.folder / "long/checkpoints", ["step 25", "step 50", "iter_0000049: whole"]),
            (checkpoint, ["rollout 49 done (step 50), 50 optimizer steps", "both moments", "every byte"]),
            (checkpoint / "rank_00000_of_00001.safetensors", ["master.model.norm.weight", "F32"]),
            (self.model, ["LlamaForCausalLM", "2 layers", f"hidden {HIDDEN}"]),
        ]
        for path, parts in cases:
            out = self.run_tandem("inspect", path)
            for part in parts:
                self.assertIn(part, out)
        broken = self.folder / "broken"
        shutil.copytree(checkpoint, broken / "iter_0000049")
        data = bytearray((broken / "iter_0000049/rank_00000_of_00001.safetensors").read_bytes())
        data[-9] ^= 16
        (broken / "iter_0000049/rank_00000_of_00001.safetensors").write_bytes(data)
        out = self.run_tandem("inspect", broken / "iter_0000049", code=1)
        self.assertIn("not those that were written", out)
        out = self.run_tandem("inspect", broken, code=1)
        self.assertIn("latest_checkpointed_iteration.txt: missing", out)
        shutil.copytree(checkpoint.with_name("iter_0000024"), broken / "iter_0000024")
        (broken / "latest_checkpointed_iteration.txt").write_text("49")
        out = self.run_tandem("inspect", broken, code=1)
        self.assertRegex(out, "goes on from: .*iter_0000024, the newest whole one")
        self.assertIn("1 of 2 checkpoints are damaged", out)
        self.run_tandem("inspect", self.folder / "nowhere", code=1)
        self.run_tandem("inspect", code=2)

    def test_equal_bits_of_a_broken_model_are_no_success(self):
        """A weight that is not a number: `selftest` would compare NaN with NaN."""
        broken = self.folder / "not-finite"
        shutil.copytree(self.model, broken)
        data = bytearray((broken / "model.safetensors").read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        entry = json.loads(data[8:start])["model.layers.1.mlp.down_proj.weight"]
        size = {"F32": 4, "BF16": 2}[entry["dtype"]]
        at = start + entry["data_offsets"][0]
        data[at:at + size] = b"\xff" * size
        (broken / "model.safetensors").write_bytes(data)
        arguments = ["selftest", "--hf-checkpoint", broken, "--tokens", "2000", "--threads-per-rank", "1"]
        out = self.run_tandem(*arguments, code=1)
        self.assertIn("log-probabilities are not finite, so equal bits mean nothing", out)

    def test_a_dry_run_starts_nothing(self):
        run = self.folder / "dry"
        start = time.monotonic()
        out = self.run_tandem(*self.flags(run, "--hf-checkpoint", MODEL, "--dry-run", "--save-interval", "1", *FUNCTION,
                                          "--eval-prompt-data", "addition", ROOT / "examples/addition/eval.jsonl"))
        print(f"dry run on {MODEL.name}: {time.monotonic() - start:.1f} s")
        room = [] if DEVICE == "cuda" else ["available"]  # of a GPU nobody is asked before the run
        for part in (*room, "LlamaForCausalLM", "144 rows", "16 samples a rollout", "activations",
                     "trainer", "free ones of 127.0.0.1", "checkpoints", "functions.reward can be loaded", "no faults"):
            self.assertIn(part, out)
        self.assertFalse(run.exists())

    def test_a_dry_run_finds_all_faults_at_once(self):
        model = self.folder / "spoilt"
        shutil.copytree(self.model, model)
        (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-64])
        prompts = self.folder / "spoilt.jsonl"
        prompts.write_text('{"prompt": "What is 1 + 1?", "label": "2"}\n{"prompt": 5, "label": "2"}\n'
                           '{"prompt": "And 2 + 2?"}\n')
        out = self.run_tandem(*self.flags("spoilt", "--hf-checkpoint", model, "--prompt-data", prompts,
                                          "--load", ROOT / "examples", "--run-dir", self.folder / "long",
                                          "--custom-rm-path", "examples.addition.functions.rewarrd",
                                          "--custom-generate-function-path", "nowhere.f",
                                          "--dry-run"), code=1)
        for part in ("model.safetensors", "line 2", "line 3", "holds no checkpoint", "no function 'rewarrd'", "nowhere"):
            self.assertIn(part, out)
        # Together with faults of the flags themselves; the run says the same.
        for more in (["--dry-run"], []):
            out = self.run_tandem(*self.flags("spoilt", "--hf-checkpoint", model, "--global-batch-size", "7",
                                              "--load", "/nowhere", "--lrr", "1", "--prompt-data", prompts, *more),
                                  code=2)
            for part in ("--global-batch-size", "--lrr", "model.safetensors", "line 2"):
                self.assertIn(part, out)
            self.assertEqual(out.count("--load"), 1, out)
        # And a run that its own checks stop tells what would have stopped it next.
        for flags in (["--hf-checkpoint", model], ["--rollout-stop-token-ids", "60000"]):
            out = self.run_tandem(*self.flags("next", *flags, "--prompt-data", prompts), code=1)
            for part in (flags[1] if flags[1] != model else "model.safetensors", "line 2", "line 3"):
                self.assertEqual(out.count(str(part)), 1, out)
            self.assertFalse((self.folder / "next/metrics.jsonl").exists())

    def test_a_dry_run_finds_what_the_run_would_find(self):
        """The same sentence from both, before a rank starts."""
        short = self.folder / "short-vocabulary"
        make_model(short, "--vocab-size", "10000")
        bare = self.folder / "no-template"
        shutil.copytree(self.model, bare)
        (bare / "chat_template.jinja").unlink()
        settings = json.loads((bare / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (bare / "tokenizer_config.json").write_text(json.dumps(settings))
        for name, flags, parts in (
                ("cache", ["--kv-cache-tokens", "16"], ["--kv-cache-tokens: found 16, one sample may need"]),
                ("same", ["--save-hf", self.model], ["--save-hf", "is the folder of --hf-checkpoint"]),
                ("stop", ["--rollout-stop-token-ids", "60000"], ["--rollout-stop-token-ids: 60000 is outside"]),
                ("procfs", ["--save-hf", "/proc/model"], ["/proc"]),
                ("words", ["--hf-checkpoint", short], ["train.jsonl: line 1", "outside the model's vocabulary of 10000"]),
                ("template", ["--hf-checkpoint", bare], ["line 1", "--chat-template-path"])):
            with self.subTest(name):
                for more in (["--dry-run"], []):
                    out = self.run_tandem(*self.flags(name, *flags, *more), code=1)
                    for part in parts:
                        self.assertIn(part, out)

    def test_a_dry_run_looks_at_the_first_rows_only(self):
        """What they leave open is no fault: 70 rows are too long, the run has the others."""
        prompts = self.folder / "long.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": "why " * (200 if i < 70 else 2), "label": "2"}) + "\n"
                                   for i in range(80)))
        flags = ["--prompt-data", prompts, "--rollout-max-prompt-len", "100", "--num-rollout", "1"]
        out = self.run_tandem(*self.flags("long-prompts", *flags, "--dry-run"))
        self.assertIn("none of the first 64 is left", out)
        self.run_tandem(*self.flags("long-prompts", *flags))


if __name__ == "__main__":
    unittest.main(verbosity=2)
