#!/usr/bin/env bash
# All that only a GPU can show, most valuable first, within 8 minutes: a step that fails or takes too long costs itself only.
# Needs torch for CUDA and Triton 3.6 (PYTHON names that Python), pytest with its plugins for asyncio and timeouts, and
# what pdx needs, its native parts for the last steps only. Without a GPU it is a dry run: steps skip what they cannot do.
# Logs: .cache/device/, or $OUT; rows: bench/results/kernels.csv, copied there too.
set -uo pipefail
export PATH # bash has a default where the environment has none
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python="${PYTHON:-python3}"
model="${MODEL:-.cache/models/SmolLM2-135M-Instruct}"
logs="${OUT:-.cache/device}"
last_second=$((SECONDS + ${LIMIT_S:-470}))
mkdir -p "$logs"
failed=0 summary=''

# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2 begun=$SECONDS log="$logs/$1.log" status
  shift 2
  printf '==> %s\n' "$name" | tee "$log"
  if ((limit > last_second - SECONDS)); then limit=$((last_second - SECONDS)); fi
  if ((limit < 5)); then
    status='not run: no time is left'
  elif timeout --kill-after=5 "$limit" "$@" </dev/null >>"$log" 2>&1; then
    status='done'
  else
    case $? in 124 | 137) status="stopped after $limit s" ;; *) status='failed' ;; esac
  fi
  [ "$status" = 'done' ] || failed=1
  tail -n +2 "$log" | tail -n 25
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
device=cuda
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || device=cpu
if [ -d "$model" ]; then
  step generate 45 "$python" -m pdx generate "$model" 'The sky is blue because' --device "$device" -n 64 --json
fi
if [ -e bench/results/kernels.csv ]; then cp bench/results/kernels.csv "$logs/"; fi
printf '\n%s' "$summary"
exit $failed
