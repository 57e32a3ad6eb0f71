#!/usr/bin/env bash
# From a clean checkout to a translator: installs what is missing, builds the command, fetches a real English-German
# corpus, trains a small Transformer, prints its BLEU on held-out text, and translates what the reader types (without a
# terminal: ten fixed sentences). Run again it reuses what is there; an interrupted training goes on.
# usage: tools/demo.sh        everything it makes lies in run/demo, run/demo-corpus and build/cpu
set -euo pipefail
cd "$(dirname "$0")/.."
corpus=run/demo-corpus
run=run/demo
frit=build/cpu/frit

say() { printf '\n== %s\n' "$*"; }
seconds_since() { echo $(($(date +%s) - $1)); }

missing=$(tools/install_deps.sh --list)
echo "This demo trains an English-German translator on this machine's processor. It will:"
if [ -n "$missing" ]; then
  echo "  1. install $(wc -w <<<"$missing") Debian packages: compiler, CMake and libraries; at most 120 MB to fetch, about a minute:"
  fold -s -w 100 <<<"$missing" | sed 's/^/       /'
else
  echo "  1. install nothing: the packages it needs are there"
fi
if [ -x "$frit" ]; then echo "  2. bring the command up to date, if its source changed"; else
  echo "  2. build the command: about 3 minutes on two cores"; fi
if [ -s "$corpus/sources.tsv" ]; then echo "  3. reuse the corpus in $corpus"; else
  echo "  3. fetch the translations of Debian's package descriptions (8 MB) and pair them: half a minute;"
  echo "     the lists are kept in ${FRIT_CACHE:-~/.cache/frit}"; fi
if [ -s "$run/model/config.json" ]; then echo "  4. reuse the model in $run"; elif [ -d "$run/interrupted" ]; then
  echo "  4. go on with the training in $run"; else
  echo "  4. train a Transformer for about 4 minutes, with a progress bar"; fi
echo "  5. print its BLEU on text it has not seen, and translate"
echo "At most 10 minutes in all on two cores. Ctrl-C stops it at any point; run it again to go on."
began=$(date +%s)

if [ -n "$missing" ]; then
  say "Installing packages"
  tools/install_deps.sh
fi

say "Building"
cmake --preset cpu >/dev/null
cmake --build --preset cpu --target frit_command -- --quiet
echo "built $frit ($(seconds_since "$began") s so far)"

say "Corpus"
tools/data/fetch_descriptions.sh "$corpus"

if [ ! -s "$run/model/config.json" ]; then
  say "Training"
  # On a slow machine or line, what came before has taken longer: training then ends earlier, to keep to ten minutes.
  limit=$(sed -n 's/^stop_after_seconds *= *\([0-9]*\).*/\1/p' examples/demo.toml)
  left=$((560 - $(seconds_since "$began")))
  if [ "$left" -lt "$limit" ]; then
    limit=$((left > 120 ? left : 120))
    echo "$(seconds_since "$began") s are gone: training is limited to $limit s (examples/demo.toml has more)"
  fi
  code=0
  "$frit" train examples/demo.toml --run.directory "$run" --training.stop_after_seconds "$limit" \
    --data.train_source "$corpus/train.en" --data.train_target "$corpus/train.de" \
    --data.valid_source "$corpus/dev.en" --data.valid_target "$corpus/dev.de" || code=$?
  if [ "$code" -ge 128 ]; then
    echo "Stopped; run it again and training goes on where it was."
    exit "$code"
  fi
  [ "$code" = 0 ] || exit "$code"
  "$frit" report "$run"
fi

say "BLEU on the held-out test text ($(wc -l <"$corpus/test.en") sentences)"
if [ ! -s "$run/evaluation.txt" ] || [ "$run/model/config.json" -nt "$run/evaluation.txt" ]; then
  { "$frit" evaluate "$run/model" "$corpus/test.en" "$corpus/test.de" &&
    python3 tools/leakage.py "$corpus/train.en" "$corpus/test.en"; } >"$run/evaluation.part"
  mv "$run/evaluation.part" "$run/evaluation.txt"
fi
cat "$run/evaluation.txt"
echo "(Read the BLEU with that in mind: package descriptions repeat themselves, so it is flattered.)"
echo "Everything took $(seconds_since "$began") s."

say "Translating"
if [ -t 0 ]; then
  echo "The model knows the language of package descriptions, and little else."
  exec "$frit" translate "$run/model"
fi
cat >"$run/sentences.en" <<'TEXT'
This package contains the documentation.
This package contains the development files.
This package provides the shared library.
It is a small program for the command line.
The program reads and writes text files.
This is a transitional package and can safely be removed.
graphical user interface for the database
a collection of fonts for the desktop
It can be used to play music and videos.
You can find more information on the website.
TEXT
"$frit" translate "$run/model" "$run/sentences.en" | paste -d '\n' "$run/sentences.en" - | sed 'n;s/^/    /'
