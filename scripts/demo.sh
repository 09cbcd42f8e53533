#!/usr/bin/env bash
# From a bare Debian 12 to a language model that visibly learns: sets everything up, then trains
# SmolLM2-135M-Instruct by GRPO to add numbers. Arguments are passed on to `tandem train`, where the
# last value of a flag wins:
#
#   scripts/demo.sh --seed 2 --num-rollout 10
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

scripts/setup.sh

command=(build/tandem train
  --hf-checkpoint "$model_dir"
  --colocate
  --prompt-data examples/addition/train.jsonl
  --input-key prompt
  --label-key label
  --apply-chat-template
  --rm-type last-number
  --eval-prompt-data addition examples/addition/eval.jsonl
  --num-rollout 40
  --rollout-batch-size 8
  --n-samples-per-prompt 8
  --rollout-max-response-len 16
  --rollout-temperature 1
  --lr 1e-5
  --adam-beta1 0.9
  --adam-beta2 0.95
  --clip-grad 1.0
  "$@")

say "Demo: 40 steps of GRPO on sums of two numbers; the plain command is"
printf '\n    '
printf '%q ' "${command[@]}" | sed 's/ --/ \\\n      --/g'
printf '\n\n'
exec "${command[@]}"
