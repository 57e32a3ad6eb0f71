#!/usr/bin/env bash
# Installs what Frit needs to build and test, from Debian's packages. Does nothing when all of it is there.
# usage: tools/install_deps.sh        (uses sudo when not root)
set -euo pipefail
packages=(g++ cmake ninja-build ccache pkg-config git python3 ca-certificates
  libdnnl-dev libhwy-dev libsentencepiece-dev libcli11-dev nlohmann-json3-dev libtomlplusplus-dev libspdlog-dev libfmt-dev
  libboost-context-dev libgtest-dev libbenchmark-dev)
missing=()
for p in "${packages[@]}"; do dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing+=("$p"); done
[ ${#missing[@]} -gt 0 ] || exit 0
echo "installing ${#missing[@]} packages: ${missing[*]}"
sudo=; [ "$(id -u)" = 0 ] || sudo=sudo
$sudo apt-get update -qq
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
