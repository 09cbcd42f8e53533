"""Checks the demo task in examples/addition: 144 training and 256 evaluation rows that together are
all pairs of 1..20, right labels, a + b and b + a on the same side, and that tools/make_addition.py
writes these very bytes. An evaluation question that leaked into training would make the demo's
result worthless, so the two sides are compared as unordered pairs. Exit code 0 or 1."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "addition"
QUESTION = re.compile(r"What is (\d+) \+ (\d+)\? Reply with the number only\.")
faults = []


def check(condition, text):
    if not condition:
        faults.append(text)


def read(name):
    pairs = []
    for number, line in enumerate((FOLDER / name).read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        match = QUESTION.fullmatch(row["prompt"])
        if not match:
            faults.append(f"{name}:{number}: prompt is {row['prompt']!r}")
            continue
        a, b = map(int, match.groups())
        check(row["label"] == str(a + b), f"{name}:{number}: label {row['label']!r}, {a + b} wanted")
        check(set(row) == {"prompt", "label"}, f"{name}:{number}: keys are {sorted(row)}")
        pairs.append((a, b))
    check(len(set(pairs)) == len(pairs), f"{name}: holds a pair twice")
    return set(pairs)


train, evaluation = read("train.jsonl"), read("eval.jsonl")
check(len(train) == 144, f"train.jsonl: {len(train)} pairs, 144 wanted")
check(len(evaluation) == 256, f"eval.jsonl: {len(evaluation)} pairs, 256 wanted")
check(train | evaluation == {(a, b) for a in range(1, 21) for b in range(1, 21)},
      "the two files together are not all pairs of 1..20")
for a, b in sorted(train):
    check((a, b) not in evaluation, f"{a} + {b} is in both files")
    check((b, a) in train, f"{a} + {b} is in train.jsonl, {b} + {a} is not")

with tempfile.TemporaryDirectory() as out:
    subprocess.run([sys.executable, ROOT / "tools" / "make_addition.py", out], check=True,
                   stdout=subprocess.DEVNULL)
    for name in ("train.jsonl", "eval.jsonl"):
        check((pathlib.Path(out) / name).read_bytes() == (FOLDER / name).read_bytes(),
              f"{name}: tools/make_addition.py writes other bytes")

for fault in faults:
    print(f"addition: {fault}")
print(f"addition: {len(train)} + {len(evaluation)} pairs, {len(faults)} faults")
sys.exit(1 if faults else 0)
