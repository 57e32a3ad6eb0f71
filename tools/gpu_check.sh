#!/usr/bin/env bash
# Checks and times everything on a machine with an NVIDIA GPU: every case of every operator on CUDA, the operator benchmarks and
# PyTorch's beside them, errors of 16-bit results beside PyTorch's, compute-sanitizer over a part of the cases; writes one JSON file
# and prints one table. Ten minutes on an H200 with 16 cores, at most fifteen.
# usage: tools/gpu_check.sh [--programs FOLDER] [--results FOLDER] [--out FILE] [--stages LIST] [--limit STAGE=SECONDS]... [--scale N]
#   --programs   use programs built elsewhere (test_ops, bench_gpu_ops) instead of building here (docs/building.md)
#   --results    where logs and parts go (build/gpu_check); a later run of other stages goes on from there
#   --out        the JSON (bench/results/gpu-ops.json)
#   --stages     which to run, with commas between, in this order: cases, bench, torch, errors, numerics, join, memcheck, racecheck
#   --limit      the most seconds that a stage may take (cases=140 bench=260 torch=270 errors=50 numerics=45 memcheck=45 racecheck=60)
#   --scale      times all limits
# A stage that runs out of time keeps what it has, says what it has not done, and counts as failed. Needs: a GPU and its driver;
# python3 with torch for torch and numerics; compute-sanitizer (comes with CUDA) for the last two. What is missing is said and left
# out. Ends with 1 if a case fails, an error is more than twice PyTorch's, a sanitizer finds something, or a stage breaks.
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/gpu_common.sh
programs= results=build/gpu_check out=bench/results/gpu-ops.json scale=1
stages=cases,bench,torch,errors,numerics,join,memcheck,racecheck
declare -A limit=([cases]=140 [bench]=260 [torch]=270 [errors]=50 [numerics]=45 [join]=30 [memcheck]=45 [racecheck]=60)
usage() {
  show_usage
  exit 2
}
while [ $# -gt 0 ]; do
  if take_flag "programs results out stages scale" "$@"; then
    shift 2
    continue
  fi
  [ $# -gt 1 ] || usage
  case "$1" in
    --limit)
      name=${2%%=*} seconds=${2#*=}
      [ -n "${limit[$name]-}" ] && [[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "gpu_check: --limit $2 is not STAGE=SECONDS" >&2; exit 2; }
      limit[$name]=$seconds
      ;;
    *) usage ;;
  esac
  shift 2
done
for stage in ${stages//,/ }; do [ -n "${limit[$stage]-}" ] || { echo "gpu_check: no stage is called $stage" >&2; exit 2; }; done
[[ $scale =~ ^[1-9][0-9]*$ ]] || { echo "gpu_check: --scale $scale is no number from 1 on" >&2; exit 2; }
runs() { case ",$stages," in *",$1,"*) return 0 ;; *) return 1 ;; esac; }
mkdir -p "$results"
need_gpu gpu_check
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$results/gpu.txt"
need_programs
status=0
# step STAGE COMMAND...: runs it, keeps the log, remembers a failure. The command sees when its time is over in $deadline (of $SECONDS).
step() {
  local name=$1 begin=$SECONDS
  deadline=$((SECONDS + limit[$name] * scale))
  shift
  echo "== $name (at most $((deadline - begin)) s)"
  "$@" 2>&1 | tee "$results/$name.log" | tail -n "${LINES_SHOWN:-40}"
  local code=${PIPESTATUS[0]}
  echo "== $name: exit code $code$([ "$code" = 124 ] && echo ', out of time'), $((SECONDS - begin)) s"
  [ "$code" = 0 ] || status=1
}
within() { timeout -k 5 $((deadline > SECONDS ? deadline - SECONDS : 1)) "$@"; }

# run_operators LIST TOGETHER COMMAND...: the cases of each operator in a program run of their own, some at a time; a line "operator
# code" each in LIST. A code of 124: out of time.
run_operators() {
  local list=$1 together=$2 op
  shift 2
  : >"$results/$list.txt"
  for op in embedding $("$programs/test_ops" --gtest_list_tests --gtest_filter='*OpCasesGpu*' | sed -n 's/^ *Pass\/\([a-z_]*\).*/\1/p' | grep -v '^embedding$'); do
    while [ "$(jobs -rp | wc -l)" -ge "$together" ]; do wait -n; done
    (
      # Races of these two are looked for so slowly that fewer cases have to do.
      case "$list/$op" in racecheck/attention | racecheck/sample_step) export FRIT_CASE_STRIDE=40 ;; esac
      within "$@" "$programs/test_ops" --gtest_brief=1 --gtest_filter="*OpCasesGpu*/$op" >"$results/${list}_$op.log" 2>&1
      code=$?
      echo "$op $code" >>"$results/$list.txt"
      [ "$code" = 0 ] || { echo "$op: exit code $code"; grep -v -E '^(Running|\[|Google|$)' "$results/${list}_$op.log" | cut -c1-300 | head -12; }
    ) &
    # Alone in the run of all cases: some of embedding's take 84 GB of the GPU.
    [ "$op" != embedding ] || [ "$together" -gt 2 ] || wait
  done
  wait
}
verdict() {
  sort "$results/$1.txt" | tr '\n' ';'
  echo
  if grep -q ' 124$' "$results/$1.txt"; then return 124; fi
  ! grep -q -v ' 0$' "$results/$1.txt"
}
# Two at a time: their oracles are the host's work. Not more: a case whose rows lie 2^30 elements apart takes up to 64 GB of the GPU.
cases() {
  run_operators tests 2
  # Tests of kernels beside the tables.
  within "$programs/test_ops" --gtest_brief=1 --gtest_filter='*Gpu*:LayerNorm*:BeamSelect*:Criterion*:Optimizer*:Embedding*:GradientNorm*-*OpCases*' >"$results/tests_others.log" 2>&1
  echo "others $?" >>"$results/tests.txt"
  tail -n 12 "$results/tests_others.log"
  verdict tests
}
# Every 8th case (races in attention and sample_step: every 40th), without those of rows far apart (frit/ops/cases_test.cc). The tool's own words count, too: it must have looked.
sanitize() {
  local log clean=0
  rm -f "$results/$1"_*.log  # of an earlier run
  FRIT_CASE_STRIDE=8 run_operators "$1" 6 compute-sanitizer --tool "$1" --error-exitcode 9
  grep -h -E '^[a-z_]+: [0-9]+ of [0-9]+ cases' "$results/$1"_*.log | tr '\n' ';'
  echo
  for log in "$results/$1"_*.log; do
    grep -q 'SUMMARY: 0 ' "$log" || { echo "$(basename "$log"): no summary without errors"; clean=1; }
  done
  verdict "$1" && return $clean
}
# Our errors of the cases that PyTorch's script has.
errors() {
  local wanted
  wanted=$(python3 bench/peers/torch_numerics.py --list | sed 's/[][\.*^$()+?{}|/]/\\&/g' | paste -sd '|') || return 1
  within "$programs/bench_gpu_ops" --errors "$results/errors.json" --filter "^($wanted)\$"
}
numerics() {
  within python3 bench/peers/torch_numerics.py --out "$results/torch_numerics.json" || return
  python3 bench/peers/torch_numerics.py --check "$results/errors.json" --out "$results/torch_numerics.json"
}
has_torch() { python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }

# What PyTorch compiles goes into one cache while the cases run, where nothing is timed.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$(realpath "$results")/inductor}
compiling=
if runs cases && runs torch && has_torch; then
  python3 bench/peers/torch_ops.py --compile-only --budget-seconds $((limit[cases] * scale)) >"$results/compile.log" 2>&1 &
  compiling=$!
fi
if runs cases; then LINES_SHOWN=150 step cases cases; fi
if [ -n "$compiling" ]; then
  wait "$compiling"
  tail -n 1 "$results/compile.log"
fi
if runs bench; then
  # The program stops by itself before its time is over, and writes what it has.
  LINES_SHOWN=400 step bench within "$programs/bench_gpu_ops" --out "$results/ours.json" --tuning "$results/tuning.json" --seconds $((limit[bench] * scale * 9 / 10))
fi
if runs torch || runs numerics; then
  if has_torch; then
    if runs torch; then
      LINES_SHOWN=150 step torch within python3 bench/peers/torch_ops.py --budget-seconds $((limit[torch] * scale * 9 / 10)) --out "$results/torch.json"
    fi
  else
    echo "python3 has no torch that sees the GPU: PyTorch left out"
  fi
fi
if runs errors; then LINES_SHOWN=5 step errors errors; fi
if runs numerics && has_torch; then LINES_SHOWN=80 step numerics numerics; fi
# Before the sanitizers, which are slow: what was measured is not lost if they are interrupted.
if runs join; then LINES_SHOWN=400 step join within python3 tools/gpu_report.py join --results "$results" --out "$out"; fi
for tool in memcheck racecheck; do
  runs "$tool" || continue
  if command -v compute-sanitizer >/dev/null; then
    LINES_SHOWN=60 step "$tool" sanitize "$tool"
  else
    echo "compute-sanitizer is not on the PATH: $tool left out"
    continue
  fi
  # Into what was joined of this folder's run, not of another one.
  if [ -e "$results/ours.json" ] && [ "$out" -nt "$results/ours.json" ]; then python3 tools/gpu_report.py sanitizers --results "$results" --out "$out" || status=1; fi
done
exit $status
