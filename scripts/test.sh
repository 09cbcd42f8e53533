#!/usr/bin/env bash
# Sets up like the demo and runs every test that this machine can run; ends with ctest's counts, and
# ctest's exit code is its own. Arguments are passed on to ctest, e.g. `scripts/test.sh -L unit`.
# A machine-readable copy of the results is left in build/ctest.xml.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

scripts/setup.sh --oracle --all

left_out=()
if [ -f .venv-oracle/.done ]; then
  note "oracle tests: with $(.venv-oracle/bin/python -c '
import importlib.metadata as m; print("transformers", m.version("transformers"))')"
else
  left_out=(-LE oracle)
  note "oracle tests: LEFT OUT, .venv-oracle could not be made (see above)"
fi

say "Tests"
exec ctest --test-dir build --output-on-failure --no-tests=error --output-junit ctest.xml \
  -j "$(nproc)" "${left_out[@]}" "$@"
