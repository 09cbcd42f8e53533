#!/usr/bin/env python3
"""What a placement costs: the same few steps under several placements on this machine, one after the
other, with the parts of a step and how busy each side was; medians over the steps after the first.

    .venv/bin/python bench/placement.py [--model DIR] [--steps 4] [--json FILE] [--only WORD]

A rank gets its share of the cores. The run's numbers do not depend on the placement (--async-steps
aside); the bench says so if they did.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
PLACEMENTS = {
    "1 colocated": ["--colocate"],
    "2 colocated": ["--colocate", "--actor-num-gpus-per-node", "2"],
    "1 colocated + 1 engine": ["--colocate", "--rollout-num-gpus", "2"],
    "1 + 1": ["--rollout-num-gpus", "1"],
    "1 + 1, p2p over sockets": ["--rollout-num-gpus", "1", "--update-weight-transfer-mode", "p2p",
                                "--no-update-weight-shared-memory"],
    "1 + 1, --async-steps 1": ["--rollout-num-gpus", "1", "--async-steps", "1"],
    "1 + 1, ahead and in flight": ["--rollout-num-gpus", "1", "--async-steps", "1",
                                   "--update-weights-in-flight"],
}
COLUMNS = {
    "step": "perf/step_time", "rollout": "perf/rollout_time", "train": "perf/train_time",
    "update": "perf/update_weights_time", "wait": "perf/train_wait_time",
    "trainer busy": "perf/trainer_utilization", "engine busy": "perf/engine_utilization",
}


def run(flags, args, folder):
    done = subprocess.run(
        [str(x) for x in [ROOT / "build/tandem", "train", "--hf-checkpoint", args.model,
         "--prompt-data", ROOT / "examples/addition/train.jsonl", "--input-key", "prompt",
         "--label-key", "label", "--apply-chat-template", "--rm-type", "last-number",
         "--rollout-shuffle", "--num-rollout", args.steps, "--rollout-batch-size", args.prompts,
         "--n-samples-per-prompt", 8, "--rollout-max-response-len", args.response_len, "--lr", "1e-5",
         "--no-progress", "--run-dir", folder, *flags]],
        capture_output=True, text=True, timeout=3600, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "models/SmolLM2-135M-Instruct"))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--response-len", type=int, default=16)
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    args = parser.parse_args()
    result = {"model": pathlib.Path(args.model).name, "cores": len(os.sched_getaffinity(0)),
              "load": os.getloadavg()[0], "placements": {}}
    losses = {}
    with tempfile.TemporaryDirectory() as name:
        for i, (title, flags) in enumerate(PLACEMENTS.items()):
            if args.only not in title:
                continue
            rows = run(flags, args, pathlib.Path(name) / str(i))
            later = rows[1:] or rows
            result["placements"][title] = {
                column: statistics.median(row.get(key, 0) for row in later)
                for column, key in COLUMNS.items()}
            if "--async-steps" not in flags:
                losses[title] = [row["train/loss"] for row in rows]
    same = len({json.dumps(loss) for loss in losses.values()}) <= 1
    result["same losses"] = same
    print(f"{result['model']}, {result['cores']} cores, load before {result['load']:.1f}; seconds a step")
    print("| placement | " + " | ".join(COLUMNS) + " |")
    print("| --- |" + " --- |" * len(COLUMNS))
    for title, row in result["placements"].items():
        cells = [f"{value:.0%}" if "busy" in column else f"{value:.3f}" if column == "update" else
                 f"{value:.2f}" for column, value in row.items()]
        print(f"| {title} | " + " | ".join(cells) + " |")
    print("losses are equal bit for bit" if same else f"LOSSES DIFFER: {losses}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
