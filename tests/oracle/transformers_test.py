"""The program against transformers itself: chat template and token ids, log-probabilities of the real
model, and a saved model that transformers loads and that computes what the program computes."""

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
MODEL = ROOT / "models/SmolLM2-135M-Instruct"
PROMPTS = ["What is 12 + 30? Reply with the number only.", "Écris 2  espaces \n et une emoji 🙂.",
           "def f(x):\n\treturn x ** 2  # 1234567890"]


def tandem(*words):
    done = subprocess.run([str(BUILD / "tandem"), *map(str, words)], capture_output=True, text=True,
                          timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def log_probs(folder, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                              attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()


class Transformers(unittest.TestCase):
    def setUp(self):
        torch.set_num_threads(2)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tandem-oracle-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def score(self, model, rows, through):
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"input_ids": r}) + "\n" for r in rows))
        return tandem("score", "--hf-checkpoint", model, "--input", path, "--dtype", "float32",
                      "--through", through)

    def test_templates_and_ids(self):
        rows = tandem("generate", "--hf-checkpoint", MODEL, "--apply-chat-template",
                      "--max-new-tokens", "1", "--prompt", *PROMPTS)
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        for prompt, row in zip(PROMPTS, rows, strict=True):
            text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False,
                                                 add_generation_prompt=True)
            self.assertEqual(row["prompt"], text)
            self.assertEqual(row["input_ids"], tokenizer(text, add_special_tokens=False)["input_ids"])

    def test_log_probabilities_of_the_real_model(self):
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        ids = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in PROMPTS]
        trainer, engine = (self.score(MODEL, ids, side) for side in ("trainer", "engine"))
        for row, t, e in zip(ids, trainer, engine, strict=True):
            self.assertEqual(t["logprobs"], e["logprobs"])
            for got, want in zip(t["logprobs"], log_probs(MODEL, row), strict=True):
                self.assertLess(abs(got - want), 1e-4)

    def test_a_saved_model_loads_and_computes_the_same(self):
        tiny, saved = self.folder / "tiny", self.folder / "saved"
        subprocess.run([sys.executable, ROOT / "tools/make_random_model.py", tiny, "--tokenizer", MODEL],
                       check=True)
        tandem("train", "--hf-checkpoint", tiny, "--colocate", "--prompt-data",
               ROOT / "examples/addition/train.jsonl", "--input-key", "prompt", "--label-key", "label",
               "--apply-chat-template", "--rm-type", "last-number", "--num-rollout", "2",
               "--rollout-batch-size", "8", "--n-samples-per-prompt", "4",
               "--rollout-max-response-len", "12", "--lr", "1e-2", "--save-hf", saved,
               "--run-dir", self.folder / "run")
        ids = list(range(100, 140))
        score = self.score(saved, [ids], "trainer")[0]["logprobs"]
        for got, want in zip(score, log_probs(saved, ids), strict=True):
            self.assertLess(abs(got - want), 1e-4)


if __name__ == "__main__":
    unittest.main(verbosity=2)
