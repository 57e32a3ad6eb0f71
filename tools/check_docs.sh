#!/bin/sh
# Fails if a generated page of docs/ is not what its program prints. With --write, writes them.
# Usage: tools/check_docs.sh [--write] [BUILD_DIR, default build/cpu]
set -e
cd "$(dirname "$0")/.."
write=
if [ "$1" = --write ]; then
  write=1
  shift
fi
build=${1:-build/cpu}
page=$(mktemp)
trap 'rm -f "$page"' EXIT
"$build/bench_ops" --support-matrix >"$page"
if [ -n "$write" ]; then
  cp "$page" docs/support.md
elif ! diff -u docs/support.md "$page"; then
  echo "docs/support.md is out of date: run tools/check_docs.sh --write" >&2
  exit 1
fi
