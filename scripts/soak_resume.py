"""The demo, ten times broken with kill -9 at a random moment within two steps of every fourth and continued,
against the demo unbroken: metrics (clock and memory aside), samples and the final model must be equal bit
for bit. Prints the table of kills and writes it to bench/results/, with the date. About twice the demo's time.

    scripts/soak_resume.py [SEED]
"""

import datetime
import filecmp
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs"
STEPS, KILLS = 40, 10
# What depends on the clock: times, memory, and how many prompts arrived before which batch.
CLOCK = ("perf/", "memory/", "time", "rollout/prefix_cache_hit_rate", "rollout/avg_cached_tokens_per_sample")


def command(name):
    run = RUNS / name
    return ["scripts/demo.sh", "--run-dir", run, "--save-interval", "4", "--save-keep-last", "2",
            "--load", run, "--save-hf", run / "model", "--eval-interval", "10"]


def start(name):
    with open(RUNS / f"{name}.out", "a") as log:
        return subprocess.Popen([str(w) for w in command(name)], stdout=log, stderr=log, cwd=ROOT)


def lines(name):
    path = RUNS / name / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def rows(name):
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCK)} for line in lines(name)]


def main():
    moments = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    RUNS.mkdir(exist_ok=True)
    for name in ("soak-unbroken", "soak-broken"):
        shutil.rmtree(RUNS / name, ignore_errors=True)
        (RUNS / f"{name}.out").unlink(missing_ok=True)
    begun = time.monotonic()
    if start("soak-unbroken").wait() != 0:
        sys.exit(f"the unbroken demo failed: {RUNS}/soak-unbroken.out")
    seconds = time.monotonic() - begun
    table = []
    for kill in range(KILLS):
        process = start("soak-broken")
        begun = time.monotonic()
        reached = STEPS * kill // KILLS
        while len(lines("soak-broken")) < reached and process.poll() is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 2) * seconds / STEPS)
        if process.poll() is not None:
            sys.exit(f"the demo ended before kill {kill + 1}: {RUNS}/soak-broken.out")
        process.send_signal(signal.SIGKILL)
        process.wait()
        pointer = RUNS / "soak-broken/checkpoints/latest_checkpointed_iteration.txt"
        table.append((kill + 1, f"{time.monotonic() - begun:.1f}", len(lines("soak-broken")),
                      pointer.read_text() if pointer.exists() else "-"))
    if start("soak-broken").wait() != 0:
        sys.exit(f"the continued demo failed: {RUNS}/soak-broken.out")
    faults = []
    if rows("soak-broken") != rows("soak-unbroken"):
        faults.append("metrics.jsonl")
    files = [f"rollouts/rollout_{i:07d}.safetensors" for i in range(STEPS)] + ["model/model.safetensors"]
    faults += [f for f in files if not filecmp.cmp(RUNS / "soak-broken" / f, RUNS / "soak-unbroken" / f, False)]
    verdict = f"differ: {', '.join(faults)}" if faults else "equal bit for bit"
    text = (f"# The demo killed {len(table)} times and continued, {datetime.date.today()}\n\n"
            f"{STEPS} steps, a checkpoint every 4. Metrics, {STEPS} rollout files and the model: {verdict}.\n\n"
            "| kill | seconds after its start | rows by then | last whole checkpoint |\n| --- | --- | --- | --- |\n"
            + "".join(f"| {' | '.join(map(str, row))} |\n" for row in table))
    results = ROOT / "bench/results"
    results.mkdir(parents=True, exist_ok=True)
    (results / f"resume-{datetime.date.today()}.md").write_text(text)
    print(text)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
