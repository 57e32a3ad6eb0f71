#!/usr/bin/env bash
# Times training steps on a machine with an NVIDIA GPU: Frit's and PyTorch's on the same models and batches, in one run; writes one
# JSON file and prints tables.
# usage: tools/gpu_train.sh [--programs FOLDER] [--results FOLDER] [--out FILE] [--stages LIST] [--only ours|torch] [--quick]
#                           [--precision NAME] [--limit STAGE=SECONDS]... [--deadline SECONDS] [--flags "FLAGS OF frit bench step"]
#   --programs   use programs built elsewhere instead of building here (docs/building.md)
#   --results    where parts and logs go (build/gpu_train). Calls with the same folder on one machine add to one run
#   --out        the JSON (bench/results/gpu-train.json)
#   --stages     of compile,fixed,real,memory,sweep,first,breakdown,trace (fixed,real,memory,sweep), in the order given: fixed is
#                mt-base and mt-big with 128 and 512 sentences of 32 tokens; sweep is mt-base with 512 to 32,768 tokens a batch; real is
#                batches of real lengths; memory is 500 of those. A stage runs Frit's rows, then PyTorch's. compile, given before them,
#                has torch.compile fill its caches, all rows at once; first is Frit's first step with what timing found before; breakdown
#                is Frit alone, with one thing switched off at a time; trace is tools/gpu_trace.sh on `frit train`. `ours` stands for
#                fixed,real,memory,sweep,first,breakdown with --only ours
#   --variants   STAGE=LIST: forms of PyTorch (see bench/peers/torch_train.py and torch_train_real.py), strongest first if time is
#                short; breakdown=LIST: of as-is,fusion,planning,graphs,attention,cudnn,packing,master,trainer,all, and chunks,recompute, which
#                switch on (see `off` below)
#   --cases      of the fixed cases (all): mt-base-128x32,mt-big-512x32,...
#   --sweep      sentences of 32 tokens in the sweep, for Frit and PyTorch ("16 32 64 256 1024")
#   --memory-models, --memory-budgets  of memory ("mt-base mt-big", "4096 16384")
#   --limit      seconds PyTorch may take in a stage (compile 150, fixed 400, real 300, memory 200, sweep 200)
#   --row-limit  and in a row of it (200)
#   --deadline   seconds for everything, from the beginning (no limit): rows that it does not reach are left out and say so
#   --after      a command that is run after each stage, when --out has what is there so far
#   --torch      flags of PyTorch's scripts, e.g. "--no-cudnn"; --trace: of tools/gpu_trace.sh, e.g. "--steps 900"
#   --precision  training.precision of Frit's rows (bf16-stochastic)
#   --flags-of   'STAGE/CASE=FLAGS': flags of frit bench step for rows whose name matches, e.g. 'fixed/mt-big-*=--training.recompute activations'
#   --quick      few steps and the smallest cases: to see that everything runs
# Needs: a GPU and its driver; python3 with torch for PyTorch's rows (left out, and said so, without it). Everything is written after
# each row, so that an interrupted run loses only the row in hand. Ends with 1 if a row of Frit fails or none of a stage of PyTorch runs.
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/gpu_common.sh
programs= results=build/gpu_train out=bench/results/gpu-train.json stages=fixed,real,memory,sweep only= quick= precision=bf16-stochastic flags= cases= sweep= torch= row_limit=200
memory_models= memory_budgets= deadline= after= trace=
declare -A limit=([compile]=150 [fixed]=400 [real]=300 [memory]=200 [sweep]=200 [first]=0 [breakdown]=0 [trace]=0)
declare -A variants=([fixed]=graphs,captured,sdpa-captured,compile,sdpa,eager,compile-bf16 [real]=sdpa,cudnn,compile [memory]=sdpa,sdpa-expandable
  [sweep]=captured,sdpa-captured,sdpa [breakdown]=as-is,graphs,planning,attention,cudnn,packing,master,trainer,all)
# What each variant of the breakdown gives to frit bench step. Without a plan there are no graphs: beside `planning` stands `graphs`,
# beside `trainer`, which needs an fp32 master, `master`.
declare -A off=([as-is]="" [fusion]="--run.fused_norm false" [planning]="--run.planned_memory false" [graphs]="--run.graphs false"
  [attention]="--run.attention materialised" [cudnn]="--run.attention cudnn" [packing]="--run.packed false" [master]="--training.precision bf16-master"
  [trainer]="--training.precision bf16-master --training.trainer per_tensor" [chunks]="--training.criterion_rows 1024" [recompute]="--training.recompute activations")
flags_of=()
off[all]="${off[planning]} ${off[attention]} ${off[packing]} ${off[trainer]}"
while [ $# -gt 0 ]; do
  if take_flag "programs results out stages only precision flags sweep torch cases row-limit memory-models memory-budgets deadline after trace" "$@"; then
    shift 2
    continue
  fi
  case "$1" in
    --limit | --variants | --flags-of) [ $# -ge 2 ] || { echo "$0: $1 needs a value" >&2; exit 2; } ;;
  esac
  case "$1" in
    --limit)
      [[ -v limit[${2%%=*}] && ${2#*=} =~ ^[0-9]+$ ]] || { echo "gpu_train: --limit $2 is not STAGE=SECONDS" >&2; exit 2; }
      limit[${2%%=*}]=${2#*=}
      shift ;;
    --variants)
      [[ -v variants[${2%%=*}] && $2 == *=?* ]] || { echo "gpu_train: --variants $2 is not STAGE=LIST" >&2; exit 2; }
      variants[${2%%=*}]=${2#*=}
      shift ;;
    --flags-of)
      [[ $2 == */*=* ]] || { echo "gpu_train: --flags-of $2 is not STAGE/CASE=FLAGS" >&2; exit 2; }
      flags_of+=("$2")
      shift ;;
    --quick) quick=yes ;;
    *) show_usage; exit 2 ;;
  esac
  shift
done
[[ $row_limit =~ ^[0-9]+$ ]] || { echo "gpu_train: --row-limit $row_limit is not a number of seconds" >&2; exit 2; }
[[ $deadline =~ ^([1-9][0-9]*)?$ ]] || { echo "gpu_train: --deadline $deadline is not a number of seconds" >&2; exit 2; }
cases_given=${cases:+,$cases,} sweep_sizes=$sweep torch_given=$torch
if [ "$stages" = ours ]; then stages=fixed,real,memory,sweep,first,breakdown only=ours; fi
for stage in ${stages//,/ }; do
  [[ -v limit[$stage] ]] || { echo "gpu_train: no stage is called $stage" >&2; exit 2; }
done
for variant in ${variants[breakdown]//,/ }; do
  [[ -v off[$variant] ]] || { echo "gpu_train: nothing is called $variant that can be switched off" >&2; exit 2; }
done
case "$only" in '' | ours | torch) ;; *) echo "gpu_train: --only ours or torch, not $only" >&2; exit 2 ;; esac
device=${FRIT_TRAIN_DEVICE:-cuda}  # cpu: tests this script where there is no GPU
[ "$device" != cuda ] || need_gpu gpu_train
[ "$only" = torch ] || need_programs
frit=$programs/frit
if [ "$only" != torch ] && [ ! -x "$frit" ]; then
  echo "gpu_train: $frit is not there" >&2
  exit 1
fi
mkdir -p "$results/logs" "$results/lengths" "$results/tuning"
python3 tools/gpu_train_report.py machine --results "$results" --frit "$frit" &  # it takes as long as what follows
torch=yes
if [ "$only" = ours ]; then
  torch=
elif ! python3 -c "import torch, sys; sys.exit('$device' == 'cuda' and not torch.cuda.is_available())" 2>/dev/null; then
  echo "python3 has no torch that sees the GPU: PyTorch left out"
  torch=
fi
wait
cat "$results/machine.json"
# Every process of PyTorch finds what an earlier one compiled.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$(realpath "$results")/inductor}
# All sizes in one place; --quick shrinks them.
steps=40 warm=10 real_steps=80 real_warm=40 few=8 memory_steps=500 models="mt-base mt-big" fixed="128 512" budgets="4096 16384" sweep="16 32 64 256 1024" broken_down="mt-base-128x32 mt-base-real-4096"
torch_flags=()
if [ -n "$quick" ]; then
  steps=5 warm=3 real_steps=8 real_warm=6 memory_steps=20 models=mt-base fixed=128 budgets=4096 sweep="16 32"
  torch_flags=(--steps 5 --warm 3 --repeats 1)
fi
[ -z "$sweep_sizes" ] || sweep=$sweep_sizes
if [ "$device" = cpu ]; then
  variants=([fixed]=sdpa,eager [real]=sdpa [memory]=sdpa [sweep]=sdpa [breakdown]=${variants[breakdown]})
  broken_down="mt-tiny-2x32 mt-tiny-real-64"
  [[ $only == ours || ,$stages, != *,compile,* ]] || variants[fixed]=compile,sdpa variants[sweep]=compile variants[real]=sdpa,compile
  models=mt-tiny fixed=2 budgets=64 sweep=1 torch_flags+=(--device cpu)
fi
memory_models=${memory_models:-$models} memory_budgets=${memory_budgets:-$budgets}
status=0
# Seconds left, at most MOST.
left() {
  local most=$1 rest
  [ -n "$deadline" ] || { echo "$most"; return; }
  rest=$((deadline - SECONDS))
  echo $((rest < 0 ? 0 : rest < most ? rest : most))
}
# GROUP CASE LENGTHS STEPS WARM [VARIANT]: one row of Frit.
ours() {
  local group=$1 case=$2 lengths=$3 variant=${6:-} log=$results/logs/ours_$1_$2${6:+_$6}.log begin=$SECONDS command what code seconds tuning
  tuning=$results/tuning/$case.json seconds=$(left 120)
  case "$case" in
    mt-tiny-*) what=(--model.preset transformer-tiny --data.vocabulary 101 --lengths "$lengths") ;;  # what the peers' scripts are tested with
    *-real-*) what=(--case "${case%%-real-*}" --lengths "$lengths") ;;
    *) what=(--case "$case") ;;
  esac
  local here=$flags rule
  for rule in "${flags_of[@]}"; do
    # shellcheck disable=SC2053  # a pattern
    [[ $group/$case != ${rule%%=*} ]] || here+=" ${rule#*=}"
  done
  # Here products and attention are timed anew, as where nothing ran before; later stages know what was found.
  case "$group" in fixed | sweep | real) rm -f "$tuning" ;; esac
  command=("$frit" bench step "${what[@]}" --training.precision "$precision" --run.device "$device" --steps "$4" --warm "$5" --tuning "$tuning" $here
    ${variant:+${off[$variant]}})
  if [ "$seconds" -lt 5 ]; then
    echo "not reached: the time given was over" >"$log"
    code=75
  else
    timeout "$seconds" "${command[@]}" >"$log" 2>&1
    code=$?
  fi
  python3 tools/gpu_train_report.py add --results "$results" --group "$group" --case "$case" --log "$log" --code "$code" --lengths "$lengths" --warm "$5" \
    --command "${command[*]}" ${variant:+--variant "$variant"} || status=1
  echo "   ($((SECONDS - begin)) s, $SECONDS in all)"
}
# STAGE SCRIPT ARGUMENTS...: PyTorch's rows, into torch_STAGE.json.
theirs() {
  local stage=$1 begin=$SECONDS seconds
  shift
  [ -n "$torch" ] || return 0
  seconds=$(left "${limit[${stage%%_*}]}")
  python3 "$@" --seconds "$seconds" --row-seconds "$row_limit" $torch_given --out "$results/torch_$stage.json" 2>"$results/logs/torch_$stage.log" ||
    { status=1; tail -n 5 "$results/logs/torch_$stage.log"; }
  echo "   ($((SECONDS - begin)) s, $SECONDS in all)"
}
lengths() {  # FILE ARGUMENTS OF make_batches.py...
  [ -s "$results/lengths/$1.json" ] || python3 bench/peers/make_batches.py "$results/lengths/$1.json" "${@:2}" >/dev/null || exit 1
}
fixed_stage() {  # GROUP MODELS SENTENCES VARIANTS
  local model n cases=()
  for model in $2; do
    for n in $3; do
      [[ -z $cases_given || $1 != fixed || $cases_given == *,"$model-${n}x32",* ]] || continue
      cases+=("$model-${n}x32")
      lengths "${n}x32" --fixed "${n}x32" --batches 4
      [ "$only" = torch ] || ours "$1" "$model-${n}x32" "$results/lengths/${n}x32.json" "$steps" "$warm"
    done
  done
  [ ${#cases[@]} -gt 0 ] || { echo "gpu_train: none of the cases of this stage is in --cases" >&2; exit 2; }
  theirs "$1" bench/peers/torch_train.py "${cases[@]}" --variants "$4" "${torch_flags[@]}"
}
real_stage() {  # GROUP STEPS WARM MODELS BUDGETS, then flags of torch_train_real.py
  local group=$1 count=$2 begin=$3 models=$4 budgets=$5 model budget files=()
  for budget in $budgets; do
    mkdir -p "$results/lengths/$group"
    lengths "$group/real-$budget" --budget "$budget" --batches $((count + begin))
    files+=("$results/lengths/$group/real-$budget.json")
    [ "$only" = torch ] || for model in $models; do ours "$group" "$model-real-$budget" "${files[-1]}" "$count" "$begin"; done
  done
  theirs "$group" bench/peers/torch_train_real.py "${files[@]}" --models "${models// /,}" --steps "$count" --warm "$begin" \
    $([ "$device" = cuda ] || echo --device cpu) "${@:6}"
}
# The compiled forms of fixed, sweep and real, all at the same time: nothing is timed meanwhile.
compile_stage() {
  local model n fixed_cases=() sweep_cases=() lengths_file=$results/lengths/real/real-${budgets%% *}
  local -x TORCHINDUCTOR_COMPILE_THREADS=2  # of each
  for model in $models; do
    for n in $fixed; do [[ -n $cases_given && $cases_given != *,"$model-${n}x32",* ]] || fixed_cases+=("$model-${n}x32"); done
  done
  for n in $sweep; do sweep_cases+=("${models%% *}-${n}x32"); done
  mkdir -p "$results/lengths/real"
  lengths "real/real-${budgets%% *}" --budget "${budgets%% *}" --batches $((real_steps + real_warm))
  if [[ ,$stages, == *,fixed,* ]]; then
    theirs compile_fixed bench/peers/torch_train.py "${fixed_cases[@]}" --variants "${variants[fixed]}" --compile-only $([ "$device" = cuda ] || echo --device cpu) &
  fi
  if [[ ,$stages, == *,sweep,* ]]; then
    theirs compile_sweep bench/peers/torch_train.py "${sweep_cases[@]}" --variants "${variants[sweep]}" --compile-only $([ "$device" = cuda ] || echo --device cpu) &
  fi
  if [[ ,$stages, == *,real,* && ,${variants[real]}, == *,compile,* ]]; then
    theirs compile_real bench/peers/torch_train_real.py "$lengths_file.json" --models "${models// /,}" --variants compile --compile-only $([ "$device" = cuda ] || echo --device cpu) &
  fi
  local job
  for job in $(jobs -p); do wait "$job" || status=1; done
}
# A few steps of the fixed cases, and of real lengths, with what timing found.
first_stage() {
  local model n budget
  compgen -G "$results/tuning/*.json" >/dev/null || { echo "first: nothing was timed before (fixed, real): left out"; return; }
  for model in $models; do
    for n in $fixed; do
      lengths "${n}x32" --fixed "${n}x32" --batches 4
      [ ! -s "$results/tuning/$model-${n}x32.json" ] || ours first "$model-${n}x32" "$results/lengths/${n}x32.json" 2 1
    done
    for budget in $budgets; do
      [ ! -s "$results/tuning/$model-real-$budget.json" ] || ours first "$model-real-$budget" "$results/lengths/real/real-$budget.json" "$real_steps" "$real_warm"
    done
  done
}
trace_stage() {
  local seconds
  seconds=$(left 300)
  [ "$seconds" -ge 20 ] || { echo "trace: not reached: the time given was over"; return; }
  timeout "$seconds" tools/gpu_trace.sh --programs "$programs" --results "$results/trace" --out "$(dirname "$out")/gpu-trace.json" --stages train --precision "$precision" $trace || status=1
}
breakdown_stage() {
  local case variant lengths count begin
  for case in $broken_down; do
    if [[ $case == *-real-* ]]; then
      lengths=breakdown/real-${case##*-} count=$real_steps begin=$real_warm
      mkdir -p "$results/lengths/breakdown"
      lengths "$lengths" --budget "${case##*-}" --batches $((count + begin))
    else
      lengths=${case##*-} count=$steps begin=$warm
      lengths "$lengths" --fixed "$lengths" --batches 4
    fi
    for variant in ${variants[breakdown]//,/ }; do ours breakdown "$case" "$results/lengths/$lengths.json" "$count" "$begin" "$variant"; done
  done
}
# Without other lines than of what went wrong.
join() {
  [ ! -s "$results/ours.json" ] && ! ls "$results"/torch_{fixed,real,memory,sweep}.json >/dev/null 2>&1 ||
    python3 tools/gpu_train_report.py join --results "$results" --out "$out" >"$results/tables.md" || { status=1; cat "$results/tables.md"; }
}
for stage in ${stages//,/ }; do
  echo "== $stage (after $SECONDS s)"
  case "$stage" in
    compile) [ "$only" = ours ] || compile_stage ;;
    fixed) fixed_stage fixed "$models" "$fixed" "${variants[fixed]}" ;;
    sweep) fixed_stage sweep "${models%% *}" "$sweep" "${variants[sweep]}" ;;
    real) real_stage real "$real_steps" "$real_warm" "$models" "$budgets" --variants "${variants[real]}" --few "$few" ;;
    first) [ "$only" = torch ] || first_stage ;;
    breakdown) [ "$only" = torch ] || breakdown_stage ;;
    memory) real_stage memory "$memory_steps" 0 "$memory_models" "$memory_budgets" --memory --variants "${variants[memory]}" ;;
    trace) [ "$only" = torch ] || trace_stage ;;
  esac
  join
  [ -z "$after" ] || eval "$after" || { echo "gpu_train: --after ended with $?"; status=1; }
done
echo "== tables (after $SECONDS s)"
[ ! -s "$results/tables.md" ] || cat "$results/tables.md"
exit $status
