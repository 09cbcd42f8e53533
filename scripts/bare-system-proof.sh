#!/usr/bin/env bash
# Proves the first command on a system that has nothing: makes a minimal Debian 12 with debootstrap in
# FOLDER, clones this repository's last commit into it and runs a command there (scripts/demo.sh unless
# others are named). The folder stays, so a second call continues in it; delete it to begin anew.
#
#   scripts/bare-system-proof.sh FOLDER [COMMAND...]
#
# Needs root, debootstrap and about 6 GB. Mounts live in a mount namespace of their own and go with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -ge 1 ] || { echo "usage: scripts/bare-system-proof.sh FOLDER [COMMAND...]" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "bare-system-proof: root is needed, for debootstrap and chroot" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "bare-system-proof: debootstrap is not installed" >&2; exit 1; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- scripts/demo.sh

if [ ! -f "$folder/.bare" ]; then
  echo "==> Minimal Debian 12 in $folder"
  rm -rf "${folder:?}/debootstrap"
  debootstrap --variant=minbase bookworm "$folder"
  touch "$folder/.bare"
fi

if [ ! -d "$folder/opt/tandem" ]; then
  echo "==> Clone of $(git rev-parse --short HEAD)"
  git clone -q --no-local . "$folder/opt/tandem"
fi
# What the network here needs: name servers and, where it re-signs, the host's certificates.
cp -L /etc/resolv.conf "$folder/etc/resolv.conf"
cp -L /etc/ssl/certs/ca-certificates.crt "$folder/etc/host-certificates.crt"

echo "==> In the bare system: $*"
settings=(HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "TERM=${TERM:-dumb}" LANG=C.UTF-8
  PIP_CERT=/etc/host-certificates.crt)
for name in http_proxy https_proxy no_proxy; do
  [ -z "${!name:-}" ] || settings+=("$name=${!name}")
done
# shellcheck disable=SC2016  # expanded by the inner shell
exec unshare --mount bash -c '
  set -euo pipefail
  folder=$1; shift
  mount --make-rprivate /
  mount -t proc proc "$folder/proc"
  mount -t tmpfs tmpfs "$folder/tmp"
  mount --rbind /dev "$folder/dev"
  mountpoint -q "$folder/dev/shm" || mount -t tmpfs tmpfs "$folder/dev/shm"
  exec chroot "$folder" env -i "${@:2:$1}" bash -c "cd /opt/tandem && exec \"\$@\"" bash "${@:$(($1 + 2))}"
' bash "$folder" ${#settings[@]} "${settings[@]}" "$@"
