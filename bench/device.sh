#!/usr/bin/env bash
# All that only a GPU can show, most valuable first, within 8 minutes: a step that fails or takes too long costs itself only.
# Needs torch for CUDA, Triton 3.6 and pytest (PYTHON names that Python); the last steps need all of pdx. Without a GPU
# it is a dry run: steps skip what they cannot do. Logs: bench/results/device/, or $OUT; rows: bench/results/kernels.csv.
set -uo pipefail
export PATH # bash has a default where the environment has none
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python="${PYTHON:-python3}"
model="${MODEL:-.cache/models/SmolLM2-135M-Instruct}"
logs="${OUT:-bench/results/device}"
last_second=$((SECONDS + ${LIMIT_S:-470}))
mkdir -p "$logs"
failed=0 summary=''

# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2 begun=$SECONDS status
  shift 2
  printf '==> %s\n' "$name"
  if ((limit > last_second - SECONDS)); then limit=$((last_second - SECONDS)); fi
  if ((limit < 5)); then
    status='not run: no time is left'
  elif timeout --kill-after=5 "$limit" "$@" </dev/null >"$logs/${name// /-}.log" 2>&1; then
    status='done'
  else
    case $? in 124 | 137) status="stopped after $limit s" ;; *) status='failed' ;; esac
  fi
  [ "$status" = 'done' ] || failed=1
  tail -n 25 "$logs/${name// /-}.log" 2>/dev/null
  printf -v summary '%s%-12s %4d s  %s\n' "$summary" "$name" $((SECONDS - begun)) "$status"
}

# Compiling is most of the time of tests; a GPU can be shared.
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n "${WORKERS:-8}"); fi
tests() { step "$1" "$2" "$python" -m pytest -q -rfE -m gpu --timeout=120 "${workers[@]}" "${@:3}"; }

step versions 30 "$python" -c '
import torch, triton
print("torch", torch.__version__, "triton", triton.__version__)
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: a dry run")'
# Registers and spills of what the driver loads are the compile gate'"'"'s.
tests registers 75 tests/kernels/gate
# Every kernel against its reference; graphs, and the progress word watched by the CPU while they replay.
tests kernels 150 tests/kernels/triton
# Decode first: beside torch, and FlashInfer and FlashAttention where they are installed, as shares of a copy.
step times 180 "$python" bench/kernels/bench_kernels.py "$@"
# Memory that two processes share; whole ranks.
tests ranks 75 tests/cuda
if [ -d "$model" ]; then
  step generate 45 "$python" -m pdx generate "$model" 'The sky is blue because' --device cuda -n 64 --json
fi
printf '\n%s' "$summary"
exit $failed
