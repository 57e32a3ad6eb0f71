#!/usr/bin/env bash
# Fetches a small real English-German corpus: the translated package descriptions of the system's own package lists.
# usage: tools/data/fetch_descriptions.sh OUT        writes OUT/{train,dev,test}.{en,de} and OUT/sources.tsv
# Needs apt-get and python3, installs nothing and changes nothing of the system's apt (the lists go to a cache of their own:
# $FRIT_CACHE, default ~/.cache/frit). The texts' licences are the packages' own: use the corpus, do not publish it.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
out=$(realpath -m "$1")
here=$(cd "$(dirname "$0")" && pwd)
cache=${FRIT_CACHE:-$HOME/.cache/frit}/descriptions
lang=de

# OUT appears as a whole, at the end: what is there is complete.
if [ -s "$out/sources.tsv" ]; then
  echo "corpus: reusing $out ($(wc -l <"$out/train.en") training pairs)"
  exit 0
fi
[ ! -e "$out" ] || { echo "corpus: $out is there, but was not made by this script: remove it or name another folder" >&2; exit 1; }
for tool in apt-get python3; do
  command -v "$tool" >/dev/null || { echo "corpus: $tool is missing; this script needs a Debian system" >&2; exit 1; }
done

mkdir -p "$cache" "$(dirname "$out")"
exec 9>"$cache/lock"
flock 9
# Translations alone: without the package indexes this is a sixth of what apt-get update fetches.
apt_options=(-qq -o Dir::State::lists="$cache/lists" -o Dir::Cache::pkgcache="" -o Dir::Cache::srcpkgcache=""
  -o Acquire::Languages="en,$lang" -o Acquire::GzipIndexes=false -o APT::Sandbox::User="$(id -un)"
  -o Acquire::IndexTargets::deb::Packages::DefaultEnabled=false -o Acquire::Retries=2)
lists() { compgen -G "$cache/lists/*_Translation-$lang" >/dev/null && compgen -G "$cache/lists/*_Translation-en" >/dev/null; }
if lists; then
  echo "corpus: using the package lists in $cache"
else
  echo "corpus: fetching the English and German package descriptions with apt: about 8 MB, a few seconds"
  mkdir -p "$cache/lists/partial"
  log=$(mktemp)
  apt-get "${apt_options[@]}" update >"$log" 2>&1 || true # one broken source among several is no harm: what counts is checked next
  if ! lists; then
    echo "corpus: apt could not fetch the descriptions. Is there a network, and does the system have Debian's own package source?" >&2
    sed 's/^/  apt: /' "$log" | head -5 >&2
    rm -f "$log"
    exit 1
  fi
  rm -f "$log"
fi

part=$(mktemp -d "$out.part-XXXXXX")
trap 'rm -rf "$part"' EXIT
mkdir "$part/packages" "$part/corpus"
python3 "$here/mkparallel.py" "$part/packages" "$cache/lists" "$lang" "$part/corpus"
if [ "$(wc -l <"$part/corpus/train.en")" -lt 10000 ]; then
  rm -rf "$cache/lists" # perhaps only some of them arrived: fetch all again next time
  echo "corpus: the package lists hold too few German descriptions; try again, or name a mirror that has Translation-de" >&2
  exit 1
fi
chmod 755 "$part/corpus"
mv -T "$part/corpus" "$out"
