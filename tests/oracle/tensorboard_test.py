"""A run's TensorBoard events read by TensorBoard itself: every number of metrics.jsonl, once; and of a
run that was killed and continued nothing twice and nothing that was cut."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError as error:
    print(f"skipped: {error}; scripts/setup.sh --oracle installs it")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else ROOT / "build")
MODEL = ROOT / "models/SmolLM2-135M-Instruct"


class TensorBoard(unittest.TestCase):
    def test_it_reads_what_the_run_wrote(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        subprocess.run([ROOT / ".venv/bin/python", ROOT / "tools/make_random_model.py", folder / "tiny",
                        "--tokenizer", MODEL, "--hidden-size", "48", "--layers", "2", "--heads", "4",
                        "--kv-heads", "2", "--intermediate-size", "80"], check=True)

        def run(steps):
            command = [BUILD / "tandem", "train", "--hf-checkpoint", folder / "tiny", "--colocate",
                       "--prompt-data", ROOT / "examples/addition/train.jsonl", "--input-key", "prompt",
                       "--label-key", "label", "--rm-type", "last-number", "--num-rollout", steps,
                       "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--lr", "1e-3",
                       "--rollout-max-response-len", "4", "--use-tensorboard", "--run-dir", folder / "run",
                       "--save-interval", "3", "--load", folder / "run"]
            done = subprocess.run([str(w) for w in command], capture_output=True, text=True, cwd=ROOT)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

        run(5)
        # As if killed after step 5 with its last checkpoint at step 3: steps 4 and 5 are done again.
        checkpoints = folder / "run/checkpoints"
        (checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
        run(6)
        rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        self.assertEqual([row["step"] for row in rows], list(range(6)))
        events = EventAccumulator(str(folder / "run/tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        for name in ("train/loss", "train/grad_norm", "rollout/raw_reward", "perf/step_time"):
            seen = [(e.step, e.value) for e in events.Scalars(name)]
            wanted = [(row["step"], row[name]) for row in rows]
            self.assertEqual([s for s, _ in seen], [s for s, _ in wanted], name)
            for (_, a), (_, b) in zip(seen, wanted):
                self.assertAlmostEqual(a, b, delta=1e-6 * max(1.0, abs(b)))


if __name__ == "__main__":
    unittest.main(verbosity=2)
