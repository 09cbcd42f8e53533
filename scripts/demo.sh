#!/usr/bin/env bash
# From a bare Debian 12 to a language model that visibly learns: sets everything up, then trains
# SmolLM2-135M-Instruct by GRPO to add numbers. Arguments go to `tandem train`; a flag named here
# takes the place of the demo's own:
#
#   scripts/demo.sh --seed 2 --num-rollout 10
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

scripts/setup.sh

flags=(
  "--hf-checkpoint $model_dir"
  "--colocate"
  "--dtype float32"
  "--prompt-data examples/addition/train.jsonl"
  "--input-key prompt"
  "--label-key label"
  "--apply-chat-template"
  "--rm-type last-number"
  "--rollout-shuffle"
  "--eval-prompt-data addition examples/addition/eval.jsonl"
  "--num-rollout 40"
  "--rollout-batch-size 8"
  "--n-samples-per-prompt 8"
  "--rollout-max-response-len 16"
  "--rollout-temperature 1"
  "--lr 1e-5"
  "--lr-decay-style cosine"
  "--lr-decay-iters 60"
  "--adam-beta1 0.9"
  "--adam-beta2 0.95"
  "--clip-grad 1.0"
  "--save-hf models/SmolLM2-135M-Instruct-addition"
)
command=(build/tandem train)
for flag in "${flags[@]}"; do
  name=${flag%% *} replaced=no
  for argument in "$@"; do
    case "$argument" in "$name" | "$name="*) replaced=yes ;; esac
  done
  # shellcheck disable=SC2206  # a flag and its values are words of their own
  [ $replaced = yes ] || command+=($flag)
done
command+=("$@")

say "Demo: GRPO on sums of two numbers; the plain command is"
printf '\n   '
for word in "${command[@]}"; do
  case "$word" in --*) printf ' \\\n      %q' "$word" ;; *) printf ' %q' "$word" ;; esac
done
printf '\n\n'
exec "${command[@]}"
