#!/usr/bin/env bash
# All that only a GPU can show, in a few minutes: what its Triton compiles, the kernels' tests, their times. Needs torch for CUDA.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
"$python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())'
"$python" -m pytest -q --timeout=300 tests/kernels/gate || echo "this Triton's code differs from the records" >&2
"$python" -m pytest -q -m gpu --timeout=300 tests/kernels tests/cuda
"$python" bench/kernels/bench_attention.py "$@"
"$python" bench/kernels/bench_dense.py "$@"
