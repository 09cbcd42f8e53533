#!/usr/bin/env python3
"""Makes the demo task: the sums of two numbers from 1 to 20, cut into training and evaluation.

    python tools/make_addition.py OUT_DIR

Writes train.jsonl (144 pairs) and eval.jsonl (256 pairs), one object a line: `prompt`, `label`. The
cut is by unordered pair: a + b and b + a always fall on the same side, so an evaluation question is
never a training question turned round. The same bytes come out every time.
"""

import json
import random
import sys
from pathlib import Path

LARGEST = 20
NUM_TRAIN = 144
SEED = 20250101


def cut():
    """(train, eval): sorted lists of ordered pairs (a, b)."""
    classes = [(a, b) for a in range(1, LARGEST + 1) for b in range(a, LARGEST + 1)]
    random.Random(SEED).shuffle(classes)
    train, evaluation = [], []
    for a, b in classes:
        pairs = sorted({(a, b), (b, a)})
        (train if len(train) + len(pairs) <= NUM_TRAIN else evaluation).extend(pairs)
    return sorted(train), sorted(evaluation)


def write(path, pairs):
    with open(path, "w", encoding="utf-8") as file:
        for a, b in pairs:
            row = {"prompt": f"What is {a} + {b}? Reply with the number only.", "label": str(a + b)}
            file.write(json.dumps(row) + "\n")


def main(arguments):
    if len(arguments) != 1:
        print("usage: make_addition.py OUT_DIR", file=sys.stderr)
        return 2
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    train, evaluation = cut()
    write(out / "train.jsonl", train)
    write(out / "eval.jsonl", evaluation)
    print(f"{out}: {len(train)} training and {len(evaluation)} evaluation pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
