"""A whole run against plain PyTorch: GRPO as its formulas read, over the run's own recorded samples, with
transformers' model and torch's AdamW. The recorded log-probabilities are the policy's that wrote the
samples, so that they agree at step k says that k updates were right, the rollout's weights included."""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import torch
import transformers
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else ROOT / "build")
MODEL = ROOT / "models/SmolLM2-135M-Instruct"
STEPS, LR = 4, 1e-3
# Unequal rewards within each group, some groups without spread, from nothing but the ids.
REWARD = """
def reward(args, sample):
    if sample.group_index % 4 == 3:
        return 0.25
    return sum(sample.tokens[-sample.response_length:]) % 3
"""


def advantages(rewards, groups):
    out = torch.zeros_like(rewards)
    for group in groups.unique():
        own = groups == group
        r = rewards[own]
        if r.max() > r.min():
            out[own] = (r - r.mean()) / (r.std() + 1e-6)
    return out


class Grpo(unittest.TestCase):
    def setUp(self):
        torch.set_num_threads(2)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tandem-oracle-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def train(self, model):
        (self.folder / "own_reward.py").write_text(REWARD)
        words = ["train", "--hf-checkpoint", model, "--colocate", "--prompt-data",
                 ROOT / "examples/addition/train.jsonl", "--input-key", "prompt", "--label-key", "label",
                 "--apply-chat-template", "--custom-rm-path", "own_reward.reward", "--num-rollout", STEPS,
                 "--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 12,
                 "--rollout-shuffle", "--lr", LR, "--adam-beta2", "0.95", "--weight-decay", "0.1", "--dtype", "float32",
                 "--save-hf", self.folder / "saved", "--run-dir", self.folder / "run"]
        done = subprocess.run([str(BUILD / "tandem"), *map(str, words)], capture_output=True, text=True,
                              timeout=600, cwd=ROOT, env={"PYTHONPATH": str(self.folder), "PATH": "/usr/bin:/bin"})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        rows = [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if "train/loss" in row]

    def test_a_run_equals_plain_pytorch(self):
        tiny = self.folder / "tiny"
        subprocess.run([sys.executable, ROOT / "tools/make_random_model.py", tiny, "--tokenizer", MODEL], check=True)
        rows = self.train(tiny)
        self.assertEqual(len(rows), STEPS)
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for step, row in enumerate(rows):
            batch = load_file(self.folder / f"run/rollouts/rollout_{step:07d}.safetensors")
            lengths, totals = batch["response_lengths"].tolist(), batch["total_lengths"].tolist()
            wanted = advantages(batch["rewards"].double(), batch["prompt_ids"])
            torch.testing.assert_close(batch["advantages"].double(), wanted, rtol=1e-6, atol=1e-6)
            optimizer.zero_grad()
            for ids, length, written, advantage in zip(batch["tokens"].split(totals), lengths,
                                                       batch["log_probs"].split(lengths), wanted, strict=True):
                ids = ids.long()
                logits = model(ids[None]).logits[0, -length - 1:-1]
                log_probs = torch.log_softmax(logits, -1).gather(1, ids[-length:, None])[:, 0]
                self.assertLess((log_probs.detach() - written).abs().max().item(), 1e-4, f"step {step}")
                loss = -(advantage.float() * torch.exp(log_probs - log_probs.detach())).mean() / len(lengths)
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            self.assertLess(abs(row["train/grad_norm"] / norm - 1), 1e-4, f"step {step}")
            optimizer.step()
        saved = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "saved", dtype=torch.float32)
        for (name, got), want in zip(saved.named_parameters(), model.parameters(), strict=True):
            # AdamW's first steps move every weight by about lr whatever its gradient; where that is
            # nothing but rounding its sign is too, so single weights may differ and the mean must not.
            self.assertLess((got - want).abs().mean().item(), 1e-2 * LR, name)


if __name__ == "__main__":
    unittest.main(verbosity=2)
