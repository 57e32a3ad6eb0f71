#!/usr/bin/env bash
# Installs what Frit needs to build and test, from Debian's packages. Does nothing when all of it is there.
# usage: tools/install_deps.sh            as root, or with sudo
#        tools/install_deps.sh --list     prints the missing packages and changes nothing
#        tools/install_deps.sh --cuda     all that, and CUDA's compiler, run time, cuBLAS, cuDNN and CUPTI: if there is no CUDA 13 yet,
#                                         fetches them from PyPI (995 MB) into FRIT_CUDA_DIR, by default ~/.cache/frit/cuda-13.0;
#                                         and cuDNN's frontend headers (12 MB) beside that folder
#        tools/install_deps.sh --nvcc     prints the path of the nvcc that the build uses (nothing if there is none)
#        tools/install_deps.sh --cudnn-frontend    prints the folder of cuDNN's frontend headers (nothing if there is none)
set -euo pipefail
packages=(g++ cmake ninja-build ccache pkg-config git python3 ca-certificates
  libdnnl-dev libhwy-dev libsentencepiece-dev libcli11-dev nlohmann-json3-dev libtomlplusplus-dev libfmt-dev
  libgtest-dev libbenchmark-dev libboost-context-dev)
cuda=${FRIT_CUDA_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/frit/cuda-13.0}
frontend=$(dirname "$cuda")/cudnn-frontend-1.32.0
here=$(cd "$(dirname "$0")" && pwd)

stop() {
  printf 'install_deps: %s\n' "$@" >&2
  exit 1
}

# Prints the first nvcc of CUDA 13 that has the libraries we link beside it: the one in PATH, CUDA_HOME's, the usual place's, ours.
find_nvcc() {
  local nvcc toolkit
  for nvcc in "$(command -v nvcc || true)" "${CUDA_HOME:-}/bin/nvcc" /usr/local/cuda/bin/nvcc "$cuda/bin/nvcc"; do
    [ -x "$nvcc" ] || continue
    nvcc=$(readlink -f "$nvcc")
    toolkit=$(dirname "$(dirname "$nvcc")")
    if [ -e "$toolkit/include/cublasLt.h" ] && [ -e "$toolkit/lib64/libcudart_static.a" ] &&
      "$nvcc" --version 2>/dev/null | grep -q 'release 13\.'; then
      echo "$nvcc"
      return
    fi
  done
}

install_packages() {
  local missing=() root=() log
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    stop "this is no Debian system (apt-get is missing)." "Install by your own means what these Debian 12 packages hold: ${packages[*]}"
  fi
  for p in "${packages[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null || true)" = installed ] || missing+=("$p")
  done
  if [ "${1:-}" = --list ]; then
    echo "${missing[*]-}"
    return
  fi
  [ ${#missing[@]} -gt 0 ] || return 0

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
  rm -f "$log"
  trap - EXIT
}

# Installs a list of PyPI's packages, with their hashes, into a folder of its own.
fetch() {
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install -q --disable-pip-version-check --no-cache-dir --no-compile --no-deps \
    --only-binary :all: --require-hashes --target "$1" -r "$2"
}

# Only headers: cuDNN itself belongs to the toolkit. Without them the build goes on and has no cuDNN.
install_frontend() {
  local target
  echo "fetching cuDNN's frontend headers (12 MB) into $frontend"
  mkdir -p "$(dirname "$frontend")"
  target=$(mktemp -d "$frontend.XXXXXX")
  if fetch "$target/site" "$here/cudnn_frontend.txt"; then
    mkdir "$target/kept"
    mv "$target/site/include" "$target"/site/*.dist-info "$target/kept/"
    rm -rf "$frontend"
    mv "$target/kept" "$frontend"
  else
    echo "install_deps: pip could not fetch them: the build will have no cuDNN, and say so" >&2
  fi
  rm -rf "$target"
}

# PyPI's packages, put together as nvcc and CMake expect a toolkit: bin, include, lib64, nvvm.
install_cuda() {
  local target
  [ "$(uname -m)" = x86_64 ] || stop "tools/cuda_packages.txt holds x86-64 packages; on $(uname -m) install CUDA 13 yourself and set CUDA_HOME"
  echo "fetching CUDA 13.0's compiler, cuBLAS, cuDNN and CUPTI (995 MB; 1.6 GB on disk) into $cuda"
  mkdir -p "$(dirname "$cuda")"
  target=$(mktemp -d "$cuda.XXXXXX")
  trap 'rm -rf "$target"' EXIT
  fetch "$target/site" "$here/cuda_packages.txt" ||
    stop "pip could not fetch them. Is there a network? Else install CUDA 13 yourself and set CUDA_HOME."
  # cuDNN has a folder of its own.
  cp -a "$target/site/nvidia/cudnn/include/." "$target/site/nvidia/cu13/include/"
  mv "$target"/site/nvidia/cudnn/lib/*.so* "$target/site/nvidia/cu13/lib/"
  # The licences stay beside what they cover.
  mv "$target"/site/nvidia_*.dist-info "$target/site/nvidia/cu13/"
  ln -s lib "$target/site/nvidia/cu13/lib64"
  for library in "$target"/site/nvidia/cu13/lib/*.so.*; do
    ln -sf "$(basename "$library")" "${library%%.so.*}.so"
  done
  rm -rf "$cuda"
  mv "$target/site/nvidia/cu13" "$cuda"
  rm -rf "$target"
  trap - EXIT
}

case ${1:-} in
  "" | --list) install_packages "${1:-}" ;;
  --nvcc) find_nvcc ;;
  --cudnn-frontend) [ ! -e "$frontend/include/cudnn_frontend.h" ] || echo "$frontend/include" ;;
  --cuda)
    nvcc=$(find_nvcc)
    # A bare Debian has no pip.
    python3 -m pip --version >/dev/null 2>&1 || packages+=(python3-pip)
    install_packages
    [ -n "$nvcc" ] || install_cuda
    nvcc=$(find_nvcc)
    [ -n "$nvcc" ] || stop "the compiler fetched into $cuda does not work: $("$cuda/bin/nvcc" --version 2>&1 | head -3)"
    echo "CUDA's compiler: $nvcc"
    [ -e "$frontend/include/cudnn_frontend.h" ] || install_frontend
    ;;
  *) stop "unknown option $1; expected --list, --cuda, --nvcc, --cudnn-frontend or none" ;;
esac
