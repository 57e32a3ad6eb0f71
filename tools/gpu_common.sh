# What tools/gpu_check.sh, gpu_train.sh and gpu_trace.sh share. Sourced from the repository's root; $programs is the folder that
# --programs names, or empty.

# Prints the comment at the head of the script that runs.
show_usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "tools/$(basename "$0")"; }
case "${1:-}" in -h | --help)
  show_usage
  exit 0
  ;;
esac

# NAMES FLAG VALUE: sets the variable that the flag names ($out for --out, $row_limit for --row-limit) if it is one of NAMES. False,
# and nothing is set, if it is none of them or has no value.
take_flag() {
  local name=${2#--}
  [[ $2 == --?* && " $1 " == *" $name "* && $# -ge 3 ]] || return 1
  printf -v "${name//-/_}" %s "$3"
}
# SCRIPT: ends it unless there is an NVIDIA GPU.
need_gpu() {
  nvidia-smi >/dev/null 2>&1 && return
  echo "$1: nvidia-smi finds no NVIDIA GPU here" >&2
  exit 1
}
# Builds what runs on a GPU, unless --programs says where it is.
need_programs() {
  [ -z "$programs" ] || return 0
  tools/install_deps.sh && tools/install_deps.sh --cuda && cmake --preset cuda && cmake --build --preset cuda --target gpu_programs || exit 1
  programs=build/cuda
}
