"""A pass over KV memory of the CUDA driver, on the double: `python -m tests.cuda.rank_pass FOLDER`.

The double's memory is the host's, so that interpreted kernels can compute on it: what is made,
exported, mapped and published is as on a GPU, what computes is not. Prints JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from pathlib import Path

import torch

from pdx.kv import cumem
from pdx.kv.layout import NodeLayout
from pdx.kv.progress import PROGRESS_BYTES, end_value
from pdx.ranks.memory import NodeMemory, RankDescriptors
from pdx.request.batch import Batch, RequestStart
from pdx.request.request import SamplingParams
from pdx.runner import memory
from tests.runner.kernel_runner import KernelRunner, kernel_runner, staged_cpu, steps

CPU = torch.device("cpu")


def host_tensor_at(mapped: cumem.GpuRange, num_bytes: int, device: int) -> torch.Tensor:
    array = (ctypes.c_uint8 * num_bytes).from_address(mapped.address)
    array._keeps = mapped  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)


def run(rank: KernelRunner) -> None:
    """20 tokens of a prompt into pages 4 and 9."""
    start = RequestStart(
        request_id=0,
        token_ids=list(range(5, 26)),
        num_computed=0,
        first_output_idx=0,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
    )
    batch = Batch(pass_idx=1, starts=[start], steps=steps(20, [[4, 9]], sample=False), removes=[])
    rank.runner.execute(batch)


def node_memory(rank: KernelRunner) -> NodeMemory:
    """As its primary maps it."""
    assert rank.exported.cuda_device is not None
    progress = os.memfd_create("progress")
    os.ftruncate(progress, PROGRESS_BYTES)
    descriptors = RankDescriptors(
        kv_fd=os.dup(rank.exported.fd),
        progress_fd=progress,
        progress_eventfd=os.eventfd(0),
        cuda_device=rank.exported.cuda_device,
    )
    layout = NodeLayout(
        rank=rank.layout, tp_size=1, num_kv_heads=4, alignment=rank.exported.alignment
    )
    return NodeMemory([descriptors], layout)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    plain = kernel_runner(folder, staged_cpu())
    run(plain)
    memory._tensor_at = host_tensor_at
    gpu = torch.device("cuda", 0)
    shared = kernel_runner(folder, staged_cpu(), kv_device=gpu)
    run(shared)
    node = node_memory(shared)
    mapped = ctypes.string_at(node.kv_address, node.kv_bytes)
    word = struct.unpack_from("<Q", shared.progress)[0]
    found = {
        "same": mapped == plain.kv.numpy().tobytes(),
        "written": int((~plain.kv[:, [4, 9]].isnan()).sum()),
        "unwritten_is_nan": bool(plain.kv[:, [0, 1, 2, 3, 5]].isnan().all()),
        "word": word == end_value(1, shared.layout.num_layers),
        "wakeups": len(node.progress_eventfds),
    }
    node.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
