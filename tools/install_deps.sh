#!/usr/bin/env bash
# Installs what Frit needs to build and test, from Debian's packages. Does nothing when all of it is there.
# usage: tools/install_deps.sh            as root, or with sudo
#        tools/install_deps.sh --list     prints the missing packages and changes nothing
set -euo pipefail
packages=(g++ cmake ninja-build ccache pkg-config git python3 ca-certificates
  libdnnl-dev libhwy-dev libsentencepiece-dev libcli11-dev nlohmann-json3-dev libtomlplusplus-dev libfmt-dev
  libgtest-dev libbenchmark-dev)

stop() {
  printf 'install_deps: %s\n' "$@" >&2
  exit 1
}
if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  stop "this is no Debian system (apt-get is missing)." "Install by your own means what these Debian 12 packages hold: ${packages[*]}"
fi
missing=()
for p in "${packages[@]}"; do
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null || true)" = installed ] || missing+=("$p")
done
if [ "${1:-}" = --list ]; then
  echo "${missing[*]-}"
  exit 0
fi
[ ${#missing[@]} -gt 0 ] || exit 0

root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || stop "these packages are missing, and I am neither root nor is there sudo. As root, run:" \
    "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
  root=(sudo)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "installing ${#missing[@]} packages: ${missing[*]}"
# One broken source among several is no harm: what counts is whether the packages can be installed.
"${root[@]}" apt-get -o Acquire::Retries=2 update -qq >"$log" 2>&1 || true
if ! "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=2 install -y -qq --no-install-recommends \
  "${missing[@]}" >>"$log" 2>&1 </dev/null; then
  grep -E '^(E|W|Err)[: ]' "$log" | head -10 | sed 's/^/  apt: /' >&2 || true
  stop "apt-get could not install them. Is there a network, and are Debian 12's sources in /etc/apt?"
fi
