#!/usr/bin/env bash
# Watches training and decoding on a machine with an NVIDIA GPU through libfrit_trace.so: the share of time in which the GPU is busy,
# and every call of the host in the loop. Writes one JSON file and prints tables. Fails if a call waits for the GPU or allocates.
# usage: tools/gpu_trace.sh [--programs FOLDER] [--results FOLDER] [--out FILE] [--stages LIST] [--config FILE.toml] [--case NAME]
#                           [--skip N] [--steps N] [--precision NAME] [--flags "FLAGS OF frit train AND frit bench step"]
#   --programs   use programs built elsewhere instead of building here (docs/building.md)
#   --results    where logs and parts go (build/gpu_trace)
#   --out        the JSON (bench/results/gpu-trace.json)
#   --stages     of train,step,decode (all): `frit train` of --config (examples/base-en-de.toml, whose text must be there) without
#                validation and checkpoints; `frit bench step` of --case (mt-base-128x32) with --precision (bf16-stochastic);
#                `frit bench decode`, 8 sentences, beam 4, 200 tokens: the third call, from its first step to its last
#   --skip       updates before those that count (50)
#   --steps      updates that count (200)
# Each stage runs three times: as it is; with every kernel recorded; with each graph recorded as a whole, which disturbs it less but
# takes gaps inside a graph for work (not decode, whose steps are told apart by a kernel's name). Needs: a GPU and its driver; libcupti.so.13 (comes with CUDA; tools/carry_libraries.sh).
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/gpu_common.sh
programs= results=build/gpu_trace out=bench/results/gpu-trace.json stages=train,step,decode config=examples/base-en-de.toml case=mt-base-128x32
skip=50 steps=200 precision=bf16-stochastic flags=
while [ $# -gt 0 ]; do
  take_flag "programs results out stages config case skip steps precision flags" "$@" || { show_usage; exit 2; }
  shift 2
done
for stage in ${stages//,/ }; do
  case "$stage" in train | step | decode) ;; *) echo "gpu_trace: no stage is called $stage" >&2; exit 2 ;; esac
done
[[ $skip =~ ^[1-9][0-9]*$ && $steps =~ ^[1-9][0-9]*$ ]] || { echo "gpu_trace: --skip and --steps are at least 1" >&2; exit 2; }
need_gpu gpu_trace
need_programs
frit=$(realpath "$programs")/frit tracer=$(realpath "$programs")/libfrit_trace.so
for file in "$frit" "$tracer"; do
  [ -e "$file" ] || { echo "gpu_trace: $file is not there: a build leaves libfrit_trace.so out where it finds no cupti.h, and says so" >&2; exit 1; }
done
if missing=$(ldd "$tracer" | grep 'not found'); then
  printf 'gpu_trace: libfrit_trace.so cannot be loaded; libcupti lies in CUDA'\''s lib64 or extras/CUPTI/lib64 (LD_LIBRARY_PATH):\n%s\n' "$missing" >&2
  exit 1
fi
mkdir -p "$results"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1 | tee "$results/gpu.txt"
status=0
# STAGE HOW: the stage's command.
command_of() {
  if [ "$1" = decode ]; then
    command=("$frit" bench decode --case mt-base-32x200-beam4-b8 --dtype fp16 --run.device cuda --repeat 3 --warm 1)
  elif [ "$1" = step ]; then
    command=("$frit" bench step --case "$case" --run.device cuda --training.precision "$precision" --warm 20 --steps $((skip + steps + 10)) $flags)
  else
    command=("$frit" train "$config" --plain --run.device cuda --run.directory "$results/train_$2" --data.valid_source "" --data.valid_target ""
      --training.early_stopping_metric loss --training.valid_every 0u --training.save_every 0u --training.log_every "${skip}u" --training.warmup 10u
      --training.stop_after "$((skip + steps + 50))u" --training.stop_after_seconds 0 $flags)
    rm -rf "$results/train_$2"
    # The text as the first run prepared it.
    if [ "$2" != plain ] && [ -d "$results/train_plain/data" ]; then
      mkdir -p "$results/train_$2"
      cp -r "$results/train_plain/data" "$results/train_plain/tokenizer" "$results/train_$2/"
    fi
  fi
}
for stage in ${stages//,/ }; do
  for how in plain nodes whole; do
    [ "$stage $how" != "decode whole" ] || continue
    begin=$SECONDS trace=$results/${stage}_$how.json
    rm -f "$trace"
    command_of "$stage" "$how"
    environment=()
    if [ "$how" != plain ]; then
      environment=(CUDA_INJECTION64_PATH="$tracer" FRIT_TRACE="$trace" FRIT_TRACE_GRAPHS="$how" FRIT_TRACE_SKIP="$skip" FRIT_TRACE_STEPS="$steps")
      # Two calls of 200 steps before, and the first step of the third.
      [ "$stage" != decode ] || environment+=(FRIT_TRACE_MARKER=search_step_kernel FRIT_TRACE_SKIP=401 FRIT_TRACE_STEPS=199)
    fi
    echo "== $stage, $how: ${environment[*]} ${command[*]}"
    timeout 300 env "${environment[@]}" "${command[@]}" >"$results/${stage}_$how.log" 2>"$results/${stage}_$how.err"
    code=$?
    grep -h '^frit_trace:' "$results/${stage}_$how.err"
    if [ "$code" != 0 ]; then
      status=1
      echo "   exit code $code"
      tail -n 5 "$results/${stage}_$how.err"
    fi
    echo "   ($((SECONDS - begin)) s)"
    [ "$how" = plain ] || [ -s "$trace" ] || { status=1; echo "   no $trace: the driver did not load $tracer, or the program did not end by itself"; }
  done
done
python3 tools/gpu_trace_report.py join --results "$results" --out "$out" --command "tools/gpu_trace.sh --config $config --case $case --skip $skip --steps $steps --precision $precision $flags" || status=1
exit $status
