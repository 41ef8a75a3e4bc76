"""KV memory as the rank makes it and the primary maps it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from pdx.kv.layout import KvLayout, NodeLayout
from pdx.ranks.memory import NodeMemory, RankDescriptors
from pdx.runner.memory import export_kv, export_progress

_THP = Path("/sys/kernel/mm/transparent_hugepage")


def _advised(file_name: str) -> list[bool]:
    """For each mapping of a memory file: whether huge pages are wanted in it."""
    found: list[bool] = []
    mine = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            mine = file_name in line
        elif mine and words[0] == "VmFlags:":
            found.append("hg" in words)
    return found


@pytest.mark.skipif(not _THP.exists(), reason="the kernel has no transparent huge pages")
def test_both_sides_ask_for_huge_pages() -> None:
    layout = KvLayout(
        num_layers=2, num_kv_heads=2, head_dim=16, page_size=16, num_pages=64, itemsize=4
    )
    before = _advised("memfd:pdx-kv")  # other tests' memory may not have been collected yet
    kv, _pages = export_kv(layout, torch.float32, torch.device("cpu"), poison=False)
    progress, eventfd = export_progress()
    memory = NodeMemory(
        [
            RankDescriptors(
                kv_fd=os.dup(kv.fd), progress_fd=os.dup(progress.fd), progress_eventfd=eventfd
            )
        ],
        NodeLayout(rank=layout, tp_size=1, num_kv_heads=2),
    )
    try:
        assert sorted(_advised("memfd:pdx-kv")) == sorted([*before, True, True])
    finally:
        memory.close()
        os.close(kv.fd)
        os.close(progress.fd)


def test_each_ranks_memory_begins_where_a_huge_page_can() -> None:
    rank = KvLayout(
        num_layers=1, num_kv_heads=1, head_dim=16, page_size=16, num_pages=3, itemsize=4
    )
    exports = [export_kv(rank, torch.float32, torch.device("cpu"), poison=False) for _ in range(2)]
    alignment = exports[0][0].alignment
    layout = NodeLayout(rank=rank, tp_size=2, num_kv_heads=2, alignment=alignment)
    assert alignment == layout.rank_stride_bytes == 2 << 20
    descriptors = []
    for kv, pages in exports:
        progress, eventfd = export_progress()
        pages.fill_(len(descriptors) + 1)
        descriptors.append(
            RankDescriptors(kv_fd=kv.fd, progress_fd=progress.fd, progress_eventfd=eventfd)
        )
    memory = NodeMemory(descriptors, layout)
    try:
        assert memory.kv_address % alignment == 0
        for rank_idx in range(2):
            address = memory.kv_address + layout.rank_offset_bytes(0, rank_idx)
            assert ctypes.c_float.from_address(address).value == rank_idx + 1
    finally:
        memory.close()
