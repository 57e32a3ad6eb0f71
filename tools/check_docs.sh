#!/bin/sh
# Fails if a generated page of docs/ is not what its program prints, or if the README or a page names a file that is not
# there. With --write, writes the generated pages.
# Usage: tools/check_docs.sh [--write] [BUILD_DIR, default build/cpu]
set -e
cd "$(dirname "$0")/.."
write=
if [ "$1" = --write ]; then
  write=1
  shift
fi
case "$1" in -*) echo "check_docs: unknown flag $1" >&2; exit 2 ;; esac
build=${1:-build/cpu}
page=$(mktemp)
trap 'rm -f "$page"' EXIT
check() {
  if [ -n "$write" ]; then
    cp "$page" "$1"
  elif ! diff -u "$1" "$page"; then
    echo "$1 is out of date: run tools/check_docs.sh --write" >&2
    exit 1
  fi
}
"$build/bench_ops" --support-matrix >"$page"
check docs/support.md
"$build/frit" train --config-reference >"$page"
check docs/configuration.md
python3 tools/readme_numbers.py ${write:+--write}
python3 tools/check_readme.py
