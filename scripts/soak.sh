#!/usr/bin/env bash
# The longer proofs; their figures go to bench/results/, with the date.
#
# Without a word both parts run, about two hours on two cores:
#   scripts/soak.sh demo [SEED...]       the demo's 40 steps with three seeds: each must end with at least
#                                        0.75 right answers to the held-out pairs, its trainer and engine
#                                        agreeing exactly at every step; about 20 minutes
#   scripts/soak.sh exactness [TOKENS]   trainer = engine bit for bit over 10^6 tokens of the demo model,
#                                        in every way that `tandem selftest` knows
#   scripts/soak.sh resume [SEED]         the demo killed at ten random moments, against the unbroken one
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

part=${1:-all}
[ $# -eq 0 ] || shift
case $part in
all | demo | exactness | resume) ;;
*)
  note "soak: '$part' found, wanted demo, exactness or resume" >&2
  exit 2
  ;;
esac

scripts/setup.sh
if [ "$part" = resume ]; then
  exec .venv/bin/python scripts/soak_resume.py "${1:-1}"
fi

if [ "$part" != demo ]; then
  say "Exactness"
  results=bench/results/exactness-$(date +%F).md
  mkdir -p bench/results
  {
    printf '# Trainer = engine on SmolLM2-135M-Instruct, %s\n\n' "$(date +%F)"
    printf '%s\n' "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)"
  } >"$results"
  failed=()
  for dtype in bfloat16 float32; do
    printf '\n## %s\n\n' "$dtype" >>"$results"
    build/tandem selftest --hf-checkpoint models/SmolLM2-135M-Instruct --dtype "$dtype" \
      --tokens "$((${1:-1000000} / 2))" | tee -a "$results" || failed+=("$dtype")
  done
  if [ ${#failed[@]} -gt 0 ]; then
    note "soak: bits differ in ${failed[*]}, see $results" >&2
    exit 1
  fi
  [ "$part" = all ] || exit 0
fi

seeds=("$@")
[ ${#seeds[@]} -gt 0 ] || seeds=(1234 1 2)
mkdir -p bench/results
for seed in "${seeds[@]}"; do
  run=runs/soak-$seed
  rm -rf "$run"
  scripts/demo.sh --seed "$seed" --rollout-seed "$seed" --run-dir "$run" \
    --save-hf "models/soak-$seed"
done
.venv/bin/python - "$(date +%F)" "${seeds[@]}" <<'PYTHON'
import json, pathlib, platform, sys

date, seeds = sys.argv[1], sys.argv[2:]
lines, bad = [], []
for seed in seeds:
    rows = [json.loads(l) for l in pathlib.Path(f"runs/soak-{seed}/metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "train/loss" in r]
    evals = [r["eval/addition"] for r in rows if "eval/addition" in r]
    gap = max(r["train/train_rollout_logprob_abs_diff_max"] for r in steps)
    seconds = sum(r["perf/step_time"] for r in steps)
    lines.append(f"| {seed} | {len(steps)} | {evals[0]:.3f} | {evals[-1]:.3f} | {gap:g} | {seconds:.0f} |")
    if evals[-1] < 0.75 or gap != 0:
        bad.append(seed)
model = next((l.split(":", 1)[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
text = (f"# Demo, 40 steps, {date}\n\n{model}, {platform.machine()}\n\n"
        "| seed | steps | right before | right after | largest gap | seconds of steps |\n"
        "| --- | --- | --- | --- | --- | --- |\n" + "\n".join(lines) + "\n")
pathlib.Path(f"bench/results/demo-{date}.md").write_text(text)
print("\n" + text)
sys.exit(f"below 0.75 or with a gap: seed {', '.join(bad)}" if bad else 0)
PYTHON
