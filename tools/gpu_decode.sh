#!/usr/bin/env bash
# Checks and times decoding on a machine with an NVIDIA GPU, PyTorch's transformers and CTranslate2 beside it in one run; writes one
# JSON file and prints one table.
# usage: tools/gpu_decode.sh [--model DIR --source FILE --reference FILE] [--programs FOLDER] [--results FOLDER] [--out FILE]
#                            [--stages LIST] [--only ours|peers] [--beam N] [--beams "LIST"] [--limit STAGE=SECONDS]... [--lines N] [--quick]
#   --model      a trained model directory (Marian layout with source.spm, target.spm, vocab.json), and a test set of it
#   --programs   use programs built elsewhere instead of building here (docs/building.md)
#   --results    where parts and logs go (build/gpu_decode). Calls with the same folder on one machine add to one run
#   --out        the JSON (bench/results/gpu-decode.json)
#   --stages     of tests,agree,halves,rows,text,survivors,hars (all; those in the middle that need --model are left out without it):
#                tests runs test_infer and the cases of the operators of a decoding step; agree compares --lines sentences in fp32 with
#                the CPU and with transformers, token for token, at each of --beams; halves is what fp16 and bf16 change; rows is
#                outputs of a fixed length from random weights; text is the test set at full speed and one by one, and a long file from
#                disk to disk; survivors counts what HARS collects; hars times the selection beside sort and topk
#   --beam       of halves, text and survivors (4); --beams of agree ("1 2 4 5 8"); --lines (200)
#   --limit      seconds a stage's programs may take, each (tests 300, agree 120, halves 120, rows 300, text 200, survivors 120, hars 150)
#   --quick      few rows and sentences: to see that everything runs
# Needs: a GPU and its driver; python3 with torch, transformers and sentencepiece for the peers, and ctranslate2 for that one (each is
# left out, and said so, without). Ends with 1 if a test fails, fp32 differs from the CPU or transformers, or a program breaks.
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/gpu_common.sh
programs= results=build/gpu_decode out=bench/results/gpu-decode.json stages=tests,agree,halves,rows,text,survivors,hars only= quick= model= source= reference=
beam=4 beams="1 2 4 5 8" lines=200
declare -A limit=([tests]=300 [agree]=120 [halves]=120 [rows]=300 [text]=200 [survivors]=120 [hars]=150)
while [ $# -gt 0 ]; do
  if take_flag "programs results out stages only model source reference beam beams lines" "$@"; then
    shift 2
    continue
  fi
  case "$1" in
    --limit) [ $# -ge 2 ] || { echo "$0: $1 needs a value" >&2; exit 2; } ;;
  esac
  case "$1" in
    --limit)
      [[ -v limit[${2%%=*}] && ${2#*=} =~ ^[0-9]+$ ]] || { echo "gpu_decode: --limit $2 is not STAGE=SECONDS" >&2; exit 2; }
      limit[${2%%=*}]=${2#*=}
      shift ;;
    --quick) quick=yes ;;
    *) show_usage; exit 2 ;;
  esac
  shift
done
[[ $lines =~ ^[1-9][0-9]*$ ]] || { echo "gpu_decode: --lines $lines is no number from 1 on" >&2; exit 2; }
for stage in ${stages//,/ }; do
  [[ -v limit[$stage] ]] || { echo "gpu_decode: no stage is called $stage" >&2; exit 2; }
done
case "$only" in '' | ours | peers) ;; *) echo "gpu_decode: --only ours or peers, not $only" >&2; exit 2 ;; esac
if [ -n "$model" ]; then
  for file in "$model/config.json" "$source" "$reference"; do
    [ -s "$file" ] || { echo "gpu_decode: --model needs --source and --reference; '$file' is not there" >&2; exit 2; }
  done
  [ "$(wc -l <"$source")" = "$(wc -l <"$reference")" ] || { echo "gpu_decode: $source and $reference have not the same number of lines" >&2; exit 2; }
fi
device=${FRIT_DECODE_DEVICE:-cuda}  # simulator: tests this script where there is no GPU
[ "$device" != cuda ] || need_gpu gpu_decode
[ "$only" = peers ] || need_programs
frit=$programs/frit
torch=yes torch_device=cuda
[ "$device" = cuda ] || torch_device=cpu
if [ "$only" = ours ]; then
  torch=
elif ! python3 -c "import torch, transformers, sys; sys.exit('$device' == 'cuda' and not torch.cuda.is_available())" 2>/dev/null; then
  echo "python3 has no torch and transformers that see the GPU: the peer is left out"
  torch=
fi
ctranslate2=$torch
if [ -n "$torch" ] && ! python3 -c "import ctranslate2, sys; sys.exit('$device' == 'cuda' and ctranslate2.get_cuda_device_count() == 0)" 2>/dev/null; then
  echo "python3 has no ctranslate2 that sees the GPU: that peer is left out"
  ctranslate2=
fi
ours=yes
[ "$only" != peers ] || ours=
mkdir -p "$results/logs" "$results/text"
python3 tools/gpu_train_report.py machine --results "$results" --frit "$frit"
cat "$results/machine.json"
# All sizes in one place; --quick and the simulator shrink them.
halves="fp16 bf16" ct2_type=float16 cases=() repeats=3 latency=100 times=16 decode_flags=() torch_rows=()
if [ -n "$quick" ]; then
  lines=$((lines < 20 ? lines : 20)) cases=(mt-base-32x32-beam4-b1) latency=10 times=2
fi
if [ "$device" = simulator ]; then
  cases=(mt-tiny-3x4-beam2-b1) repeats=1 ct2_type=float32 decode_flags=(--repeat 1 --warm 0 --products library)
fi
for case in ${cases[@]+"${cases[@]}"}; do decode_flags+=(--case "$case"); done
torch_rows=(${cases[@]+"${cases[@]}"})
status=0
report() { python3 tools/gpu_decode_report.py "$@"; }
# STAGE NAME COMMAND...: runs it within the stage's limit; output in logs/NAME.log, errors in logs/NAME.err.
run() {
  local stage=$1 name=$2 begin=$SECONDS
  shift 2
  timeout "${limit[$stage]}" "$@" >"$results/logs/$name.log" 2>"$results/logs/$name.err"
  local code=$?
  echo "$name: exit code $code, $((SECONDS - begin)) s"
  [ "$code" = 0 ] || { status=1; tail -n 4 "$results/logs/$name.log" "$results/logs/$name.err" | cut -c1-400; }
  return $code
}
# The sentences, as many as asked for, and their references.
if [ -n "$model" ]; then
  [ -z "$quick" ] || { head -n 60 "$source" >"$results/text/source"; head -n 60 "$reference" >"$results/text/reference"; source=$results/text/source reference=$results/text/reference; }
  head -n "$lines" "$source" >"$results/text/few"
fi
tests_stage() {
  [ -n "$ours" ] || return 0
  local filter
  FRIT_SOURCE_DIR=$PWD run tests test_infer "$programs/test_infer" --gtest_brief=1
  echo "test_infer $?" >"$results/tests.txt"
  for filter in decode_attention linear_rows search_step sample_step beam_select; do
    run tests "cases_$filter" "$programs/test_ops" --gtest_brief=1 --gtest_filter="*OpCases*/$filter"
    echo "$filter $?" >>"$results/tests.txt"
  done
}
translate() {  # STAGE NAME FLAGS...: text/NAME from text/few or the source
  local stage=$1 name=$2
  shift 2
  run "$stage" "$name" "$frit" translate "$model" "$@" && mv "$results/logs/$name.log" "$results/text/$name"
}
agree_stage() {
  local k
  for k in $beams; do
    if [ -n "$ours" ]; then
      translate agree "cpu_beam$k" "$results/text/few" --ids --beam "$k"
      translate agree "gpu_beam$k" "$results/text/few" --ids --beam "$k" --device "$device" --dtype fp32
    fi
    [ -z "$torch" ] || run agree "torch_beam$k" python3 bench/peers/torch_translate.py --model "$model" --input "$results/text/few" --beam "$k" --dtype fp32 \
      --latency-lines 0 --device "$torch_device" --ids-out "$results/text/torch_beam$k" --out "$results/text/torch_beam$k.json"
    [ ! -e "$results/text/gpu_beam$k" ] || report agree --results "$results" --beam "$k" || status=1
  done
}
halves_stage() {
  local dtype
  [ -n "$ours" ] || return 0
  for dtype in fp32 $halves; do
    translate halves "$dtype" "$source" --beam "$beam" --device "$device" --dtype "$dtype"
    # The same bits in every batch: small batches must not change a line.
    translate halves "${dtype}_rows" "$results/text/few" --beam "$beam" --device "$device" --dtype "$dtype" --products rows
    translate halves "${dtype}_rows_small" "$results/text/few" --beam "$beam" --device "$device" --dtype "$dtype" --products rows --batch-tokens 200
    run halves "bleu_$dtype" "$frit" evaluate --hypotheses "$results/text/$dtype" --reference "$reference" --json
  done
  report halves --results "$results" || status=1
}
rows_stage() {
  local dtype=fp16
  [ "$device" = cuda ] || dtype=fp32
  [ -z "$ours" ] || run rows rows "$frit" bench decode --run.device "$device" --dtype "$dtype" ${decode_flags[@]+"${decode_flags[@]}"}
  [ -z "$torch" ] || run rows torch_rows python3 bench/peers/torch_translate.py ${torch_rows[@]+"${torch_rows[@]}"} --dtype "$dtype" --repeat "$repeats" --device "$torch_device" \
    --seconds "${limit[rows]}" --out "$results/torch_rows.json"
  [ -z "$ctranslate2" ] || run rows ctranslate2_rows python3 bench/peers/ctranslate2_translate.py --case ${torch_rows[@]+"${torch_rows[@]}"} --compute-type "$ct2_type" --repeat "$repeats" \
    --device "$torch_device" --seconds "${limit[rows]}" --out "$results/ctranslate2_rows.json"
}
text_stage() {
  local dtype=fp16 i
  [ "$device" = cuda ] || dtype=fp32
  if [ -n "$ours" ]; then
    run text text "$frit" bench translate "$model" "$source" --beam "$beam" --device "$device" --dtype "$dtype" --latency-lines "$latency" --repeat "$repeats"
    for i in $(seq "$times"); do cat "$source"; done >"$results/text/long"
    translate text disk "$results/text/long" --beam "$beam" --device "$device" --dtype "$dtype" --stats
  fi
  [ -z "$torch" ] || run text torch_text python3 bench/peers/torch_translate.py --model "$model" --input "$source" --beam "$beam" --dtype "$dtype" \
    --latency-lines "$latency" --batch-tokens 16384 --device "$torch_device" --seconds "${limit[text]}" --out "$results/torch_text.json"
  [ -n "$ctranslate2" ] || return 0
  for i in 1 4; do  # workers: replicas that share the weights
    run text "ctranslate2_text$i" python3 bench/peers/ctranslate2_translate.py "$model" --input "$source" --converted "$results/ct2" --beam "$beam" --compute-type "$ct2_type" \
      --workers "$i" --threads "$i" --latency-lines "$((i == 1 ? latency : 0))" --batch-tokens $((16384 / i)) --repeat "$repeats" --device "$torch_device"
  done
}
survivors_stage() {
  local dtype=fp16
  [ "$device" = cuda ] || dtype=fp32
  [ -z "$ours" ] || run survivors survivors "$frit" bench translate "$model" "$source" --beam "$beam" --device "$device" --dtype "$dtype" --survivors --repeat 1
}
hars_stage() {
  [ "$device" = cuda ] || { echo "hars needs a GPU"; return 0; }
  [ -z "$ours" ] || run hars hars "$programs/bench_gpu_ops" --filter 'beam_select.*(512x50304|2048x32768)' --out "$results/hars.json"
  [ -z "$torch" ] || run hars torch_hars python3 bench/peers/torch_ops.py --rows beam_step --budget-seconds "${limit[hars]}" --out "$results/torch_hars.json"
}
for stage in ${stages//,/ }; do
  echo "== $stage"
  if [[ -z $model && " agree halves text survivors " == *" $stage "* ]]; then
    echo "needs --model: left out"
    continue
  fi
  "${stage}_stage"
done
echo "== table"
report join --results "$results" --out "$out" || status=1
exit $status
