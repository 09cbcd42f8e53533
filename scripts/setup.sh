#!/usr/bin/env bash
# Makes a bare Debian 12 ready: system packages, .venv, the demo model and the program in build/.
# Each step is skipped when done, works offline once done, and can be interrupted and called again.
#
#   scripts/setup.sh [--oracle] [--cuda] [--all] [--strict] [--no-build] [--no-packages]
#
#   --oracle       also make .venv-oracle (transformers and its needs) for the oracle tests
#   --cuda         also build the part for NVIDIA GPUs, all in build-cuda/: needs nvcc 13 (no GPU)
#   --all          build the tests and benchmarks too, not only the program
#   --strict       warnings are errors (Debian 12's compiler alone is free of them); CI wants that
#   --no-build     stop before the build
#   --no-packages  leave system packages alone
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

oracle=no cuda=no target=td_cli preset=dev packages=yes
for argument in "$@"; do
  case "$argument" in
    --oracle) oracle=yes ;;
    --cuda) cuda=yes ;;
    --all) target=all ;;
    --strict) preset=strict ;;
    --no-build) target=none ;;
    --no-packages) packages=no ;;
    *) fail "'$argument': unknown; known are --oracle, --cuda, --all, --strict, --no-build, --no-packages" ;;
  esac
done

say "Download"
total=0
if [ $packages = yes ]; then
  count=$(missing_packages | wc -l)
  note "$count system packages$([ "$count" = 0 ] || echo " (up to 140 MB on a bare Debian; apt says the exact size)")"
fi
megabytes=$(missing_megabytes .venv scripts/requirements.lock)
note "$megabytes MB for .venv (torch's wheel 531 MB, the demo model 93 MB, helpers)"
total=$((total + megabytes))
if [ $oracle = yes ]; then
  megabytes=$(missing_megabytes .venv-oracle scripts/requirements-oracle.lock)
  note "$megabytes MB for .venv-oracle (transformers and its needs; torch is linked)"
  total=$((total + megabytes))
fi
if [ $cuda = yes ]; then
  note "64 MB for the headers of FlashInfer and of cuDNN's front end$(! has_gpu || echo "; 2.5 GB for the CUDA libraries that torch needs on a GPU")"
fi
note "$total MB of Python packages in all; about 3.5 GB of disk once unpacked and built"

if [ $packages = yes ]; then
  say "System packages"
  install_packages
fi

say "Python environment .venv"
make_main_environment

if [ $oracle = yes ]; then
  say "Python environment .venv-oracle"
  # A failure here costs the oracle tests, not the others; test.sh says so.
  (make_oracle_environment) || note ".venv-oracle is not ready: the oracle tests cannot run"
fi

say "Demo model $model_dir"
make_model

if [ $cuda = yes ]; then
  say "CUDA"
  make_cuda
fi

if [ $target != none ]; then
  say "Build ($(build_jobs) jobs; about 10 minutes on two cores the first time)"
  build "$target" $preset
  [ $cuda = no ] || build_cuda "$target"
fi
