#!/usr/bin/env bash
# Copies the shared libraries that the programs of a CUDA build need beside them, where they look first, so that the folder runs on
# a machine that lacks Debian's packages. The C and C++ run times and CUDA's own libraries (cuBLAS, cuDNN) are left to that machine;
# CUPTI, which libfrit_trace.so needs and not every machine has, is copied.
# usage: tools/carry_libraries.sh [BUILD_DIR, default build/cuda]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/cuda}
programs=()
for file in "$build"/*; do
  [ -f "$file" ] && [ -x "$file" ] && [[ $(basename "$file") != *.so* || $file = */libfrit_trace.so ]] && programs+=("$file")
done
[ ${#programs[@]} -gt 0 ] || { echo "carry_libraries: no programs in $build: build them first" >&2; exit 1; }
missing=$(ldd "${programs[@]}" | grep 'not found' | sort -u || true)
[ -z "$missing" ] || { printf 'carry_libraries: not on this machine either:\n%s\n' "$missing" >&2; exit 1; }
ldd "${programs[@]}" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
  grep -vE '/(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|libcublas|libcublasLt|libcudart|libcudnn[a-z_]*|libnccl|libnvrtc|libcuda)\.so' |
  while read -r library; do
    [ "$(dirname "$library")" -ef "$build" ] || cp -fL "$library" "$build/"
  done
