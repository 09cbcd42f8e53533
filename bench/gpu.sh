#!/usr/bin/env bash
# Tandem beside its peers on this machine's GPU, one part a call; a JSON object a line, kept in
# bench/results/ when a file is named. Each part ends within 8 minutes.
#
#   bench/gpu.sh decode|train|update|transfer [RESULT_FILE]
#
# transfer moves weights from one GPU to another and says `not run` where there is one.
#
# Wants build-cuda/ (cmake --preset cuda; cmake --build build-cuda --target tandem_cuda gpu_bench) and,
# for the peers, a Python with torch and transformers (PEER_PYTHON, else python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
part=${1:-} out=${2:-/dev/null}
build=${BUILD:-build-cuda}
case "$part" in
  decode) ours=(decode 1 64 256) peer=(decode 1 64) ;;
  train) ours=(train) peer=(train) ;;
  update) ours=(update) peer=(copy) ;;
  transfer) ours=(transfer) peer=(transfer) ;;
  *) echo "usage: bench/gpu.sh decode|train|update|transfer [RESULT_FILE]" >&2; exit 2 ;;
esac
{
  "$build/gpu_bench" "${ours[@]}"
  timeout 400 "${PEER_PYTHON:-python3}" bench/gpu_peer.py "${peer[@]}" 2>/dev/null ||
    echo '{"part": "'"$part"'", "system": "peer", "error": "did not finish"}'
} | tee -a "$out"
