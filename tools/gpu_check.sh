#!/usr/bin/env bash
# Checks and times everything on a machine with an NVIDIA GPU: every case of every operator on CUDA, compute-sanitizer over a
# part of them, the operator benchmarks, and PyTorch's beside them; writes one JSON file and prints one table.
# usage: tools/gpu_check.sh [--programs FOLDER] [--results FOLDER] [--out FILE] [--no-torch] [--no-sanitizer] [--seconds N]
#   --programs   use programs built elsewhere instead of building here (docs/building.md)
#   --results    where logs and parts go (build/gpu_check)
#   --out        the JSON (bench/results/gpu-ops.json)
#   --seconds    for PyTorch's benchmarks (240)
# Needs: a GPU and its driver; python3 with torch for the comparison; compute-sanitizer (comes with CUDA) for that part. What is
# missing is said and left out. Ends with 1 if a case fails, a sanitizer finds something or a benchmark breaks.
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/gpu_common.sh
programs= results=build/gpu_check out=bench/results/gpu-ops.json torch=yes sanitizer=yes seconds=240
while [ $# -gt 0 ]; do
  if take_flag "programs results out seconds" "$@"; then
    shift 2
    continue
  fi
  case "$1" in
    --no-torch) torch= ;;
    --no-sanitizer) sanitizer= ;;
    *) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
  shift
done
mkdir -p "$results"
need_gpu gpu_check
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$results/gpu.txt"
need_programs
status=0
step() {  # name, command...: runs it, keeps the log, remembers a failure
  local name=$1 begin=$SECONDS
  shift
  echo "== $name"
  "$@" 2>&1 | tee "$results/$name.log" | tail -n "${LINES_SHOWN:-40}"
  local code=${PIPESTATUS[0]}
  echo "== $name: exit code $code, $((SECONDS - begin)) s"
  [ "$code" = 0 ] || status=1
}
# Each operator's cases are a program run of their own, two at a time: their oracles are the host's work. Not more: a case whose
# rows lie 2^30 elements apart takes up to 64 GB of the GPU, embedding's 84.
cases() {
  local op
  : >"$results/tests.txt"
  for op in embedding $("$programs/test_ops" --gtest_list_tests --gtest_filter='*OpCasesGpu*' | sed -n 's/^ *Pass\/\([a-z_]*\).*/\1/p' | grep -v '^embedding$'); do
    while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
    (
      "$programs/test_ops" --gtest_brief=1 --gtest_filter="*OpCasesGpu*/$op" >"$results/cases_$op.log" 2>&1
      code=$?
      echo "$op $code" >>"$results/tests.txt"
      [ "$code" = 0 ] || { echo "$op: exit code $code"; grep -v -E '^(Running|\[|Google|$)' "$results/cases_$op.log" | cut -c1-300 | head -12; }
    ) &
    [ "$op" != embedding ] || wait
  done
  wait
  # Tests of kernels beside the tables.
  "$programs/test_ops" --gtest_brief=1 --gtest_filter='*Gpu*:LayerNorm*:BeamSelect*:Criterion*:Optimizer*:Embedding*:GradientNorm*-*OpCases*' >"$results/cases_others.log" 2>&1
  echo "others $?" >>"$results/tests.txt"
  tail -n 12 "$results/cases_others.log"
  sort "$results/tests.txt" | tr '\n' ';'
  ! grep -q -v ' 0$' "$results/tests.txt"
}
LINES_SHOWN=150 step cases cases
LINES_SHOWN=400 step bench "$programs/bench_gpu_ops" --out "$results/ours.json" --tuning "$results/tuning.json"
LINES_SHOWN=5 step errors "$programs/bench_gpu_ops" --errors "$results/errors.json"
if [ -n "$torch" ]; then
  if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    LINES_SHOWN=150 step torch python3 bench/peers/torch_ops.py --budget-seconds "$seconds" --out "$results/torch.json"
    LINES_SHOWN=60 step numerics python3 bench/peers/torch_numerics.py --check "$results/errors.json" --out "$results/torch_numerics.json"
  else
    echo "python3 has no torch that sees the GPU: PyTorch left out"
  fi
fi
# Before the sanitizers, which are slow: what was measured is not lost if they are interrupted.
python3 tools/gpu_report.py join --results "$results" --out "$out" || status=1
if [ -n "$sanitizer" ]; then
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
      FRIT_CASE_STRIDE=16 LINES_SHOWN=8 step "$tool" timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 9 "$programs/test_ops" --gtest_brief=1 --gtest_filter='*OpCasesGpu*'
    done
  else
    echo "compute-sanitizer is not on the PATH: left out"
  fi
fi
exit $status
