"""`tandem generate` on SmolLM2 in float32 against transformers' greedy generation: 20 prompts, 64 tokens
each, equal. The prompts were chosen so that the two likeliest tokens never come nearer than 1e-3 in
their logits: below that two programs that both round correctly may differ, and a test would be luck.

transformers' generate() itself writes one of the answers. Of all it computes the logits in one call a
prompt, over prompt and answer: where each token is the likeliest after those before it, greedy
generation would have written just these, by induction from the first."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else ROOT / "build")
MODEL = ROOT / "models/SmolLM2-135M-Instruct"
TOKENS = 64
LEAST_MARGIN = 3e-4
TEXTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "The three laws of motion are",
    "import numpy as np\n\nx = np.linspace(0, 1, 11)\n",
    "Ingredients: two eggs, 200 g of flour,",
    "The quick brown fox jumps over",
    "In 1969, the first",
    "A prime number is a",
    "Dear Sir or Madam,",
    "SELECT name, age FROM",
]
QUESTIONS = [
    "What is 7 + 5? Reply with the number only.",
    "Name three primes above 100.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "Translate 'good morning' to French.",
    "List the planets of the solar system.",
    "What does an operating system do?",
    "Give me a recipe for pancakes.",
]


class Greedy(unittest.TestCase):
    def test_twenty_prompts_of_64_tokens(self):
        torch.set_num_threads(2)
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        prompts = TEXTS + [
            tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
            for q in QUESTIONS
        ]
        self.assertEqual(len(prompts), 20)
        ids = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.write("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
            file.flush()
            done = subprocess.run(
                [str(BUILD / "tandem"), "generate", "--hf-checkpoint", str(MODEL), "--input", file.name,
                 "--dtype", "float32", "--temperature", "0", "--max-new-tokens", str(TOKENS), "--ignore-eos"],
                capture_output=True, text=True, timeout=900, cwd=ROOT)
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

        model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
        for prompt, row in zip(ids, rows, strict=True):
            self.assertEqual(row["input_ids"], prompt)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + row["output_ids"]])).logits[0, len(prompt) - 1:-1]
            best = logits.topk(2, dim=-1)
            margin = float((best.values[:, 0] - best.values[:, 1]).min())
            with self.subTest(prompt=tokenizer.decode(prompt), margin=margin):
                self.assertEqual(len(row["output_ids"]), TOKENS)
                self.assertEqual(row["output_ids"], best.indices[:, 0].tolist())
                self.assertGreater(margin, LEAST_MARGIN)
        model.generation_config = transformers.GenerationConfig()  # its EOS would fill in for None
        settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=TOKENS, eos_token_id=None,
                                                 pad_token_id=0)
        found = model.generate(torch.tensor([ids[0]]), attention_mask=torch.ones(1, len(ids[0]), dtype=torch.long),
                               generation_config=settings)
        self.assertEqual(rows[0]["output_ids"], found[0, len(ids[0]):].tolist())


if __name__ == "__main__":
    unittest.main(verbosity=2)
