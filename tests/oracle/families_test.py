"""Every family in both directions: folders that transformers 5 saves give the same numbers as the golden
ones (which are in the older hub style or that of transformers 5), and a model that was trained here
agrees with its engine, loads in transformers and computes there what it computes here."""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else ROOT / "build")
GOLDEN = ROOT / "tests/golden/tiny"
TOKENIZER = ROOT / "models/SmolLM2-135M-Instruct"
TRAINED = ["mistral", "phi3_longrope", "smollm3", "olmo2", "glm4", "gemma3"]


def tandem(*words):
    done = subprocess.run([str(BUILD / "tandem"), *map(str, words)], capture_output=True, text=True,
                          timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


class Families(unittest.TestCase):
    def setUp(self):
        torch.set_num_threads(1)
        torch.manual_seed(1)
        transformers.utils.logging.disable_progress_bar()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tandem-families-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def score(self, model, rows, *flags):
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"input_ids": r}) + "\n" for r in rows))
        return tandem("score", "--hf-checkpoint", model, "--input", path, "--dtype", "float32", *flags)

    def test_folders_saved_by_transformers(self):
        models = sorted(p.parent for p in GOLDEN.glob("*/config.json"))
        self.assertGreaterEqual(len(models), 14)
        for golden in models:
            with self.subTest(model=golden.name):
                saved = self.folder / golden.name
                transformers.AutoModelForCausalLM.from_pretrained(golden, dtype=torch.float32).save_pretrained(saved)
                expected = json.loads((golden / "expected.json").read_text())
                rows = [s["input_ids"] for s in expected["sequences"]]
                self.assertEqual(self.score(saved, rows, "--gradients"), self.score(golden, rows, "--gradients"))

    # A golden config with the real tokenizer's vocabulary and fresh weights.
    def random_model(self, name):
        folder = self.folder / name
        shutil.copytree(TOKENIZER, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
        config = json.loads((GOLDEN / name / "config.json").read_text())
        config["vocab_size"] = json.loads((TOKENIZER / "config.json").read_text())["vocab_size"]
        (folder / "config.json").write_text(json.dumps(config))
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        model.save_pretrained(self.folder / "weights")
        shutil.move(self.folder / "weights/model.safetensors", folder)
        shutil.rmtree(self.folder / "weights")
        return folder

    def test_trained_models_agree_with_their_engine_and_with_transformers(self):
        ids = list(range(100, 150))
        for name in TRAINED:
            with self.subTest(model=name):
                start, saved, run = self.random_model(name), self.folder / f"{name}-saved", self.folder / f"{name}-run"
                tandem("train", "--hf-checkpoint", start, "--colocate", "--dtype", "float32", "--prompt-data",
                       ROOT / "examples/addition/train.jsonl", "--input-key", "prompt", "--label-key", "label",
                       "--apply-chat-template", "--rm-type", "last-number", "--num-rollout", "2",
                       "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
                       "--rollout-max-response-len", "12", "--lr", "1e-2", "--entropy-coef", "0.1",  # a random model earns no reward
                       "--save-hf", saved, "--run-dir", run)
                rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                gaps = [r["train/train_rollout_logprob_abs_diff"] for r in rows if "train/train_rollout_logprob_abs_diff" in r]
                self.assertEqual(gaps, [0.0, 0.0])
                self.assertEqual((saved / "config.json").read_bytes(), (start / "config.json").read_bytes())
                self.assertNotEqual(self.score(saved, [ids]), self.score(start, [ids]))
                model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager")
                with torch.no_grad():
                    logits = model(torch.tensor([ids])).logits[0, :-1].double()
                want = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()
                for got, number in zip(self.score(saved, [ids])[0]["logprobs"], want, strict=True):
                    self.assertLess(abs(got - number), 1e-4)


if __name__ == "__main__":
    unittest.main(verbosity=2)
