"""Memory of whole rank processes while they load: what they keep, and little beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.hollow_checkpoint import write_hollow_checkpoint
from tests.oracle.tiny_checkpoint import QWEN3_MOE
from tests.runner.rank_process import RankProcess, rank_config

QWEN: dict[str, Any] = {**QWEN3_MOE.shared, **QWEN3_MOE.hub_only, "mlp_only_layers": []}


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is no file's. (KV memory is one.)"""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


@contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """The largest of many looks at a process, as the list's only number."""
    peak, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], anonymous_bytes(pid))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def load(folder: Path, tp_size: int, rendezvous: Path) -> list[tuple[int, int]]:
    """Of each rank: bytes of its parameters, and its memory's peak up to readiness."""
    configs = [
        rank_config(
            folder,
            dtype="bfloat16",
            tp_rank=rank,
            tp_size=tp_size,
            rendezvous=str(rendezvous),
            poison=False,
        )
        for rank in range(tp_size)
    ]
    with ExitStack() as stack:
        ranks = [stack.enter_context(RankProcess(config, timeout_s=400)) for config in configs]
        peaks = [stack.enter_context(watched(rank.process.pid)) for rank in ranks]
        for rank in ranks:
            rank.wait_ready()
        time.sleep(0.05)  # for a last look
        return [
            (rank.loading[-1].total_bytes, peak[0]) for rank, peak in zip(ranks, peaks, strict=True)
        ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_rank_takes_little_more_than_it_keeps(tp_size: int, tmp_path: Path) -> None:
    """The baseline, torch and all else that a rank imports, is that of a rank of a small model."""
    small, large = tmp_path / "small", tmp_path / "large"
    for folder in (small, large):
        folder.mkdir()
    write_hollow_checkpoint(small, QWEN, num_files=1)
    sizes = {"hidden_size": 1024, "num_experts": 128, "moe_intermediate_size": 768}
    num_bytes = write_hollow_checkpoint(large, {**QWEN, **sizes}, num_files=50)
    assert num_bytes > 2 << 30
    baselines = [peak - kept for kept, peak in load(small, tp_size, tmp_path / "first")]
    for baseline, (kept, peak) in zip(
        baselines, load(large, tp_size, tmp_path / "second"), strict=True
    ):
        assert kept > 0.95 * num_bytes / tp_size
        print(f"kept {kept / 1e6:.0f} MB, took {(peak - baseline) / 1e6:.0f} MB", flush=True)
        assert peak - baseline < 1.2 * kept
