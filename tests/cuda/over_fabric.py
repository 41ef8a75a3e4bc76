"""Nodes with ranks on GPUs, joined by a fabric: `python -m tests.cuda.over_fabric`, on the double.

What it found is the JSON that it prints.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from pdx.fabric import (
    Arrived,
    Fabric,
    FabricEvent,
    FabricOptions,
    MemoryPart,
    PageBatch,
    Provider,
    open_fabric,
)
from pdx.kv import cumem
from pdx.messenger.fabric_hub import FabricHub, MappedMemory
from pdx.ranks.memory import NodeMemory
from tests.cuda.processes import (
    RANK,
    layout_of,
    live,
    node_memory,
    num_fds,
    rank_bytes,
    read,
    write,
)

#: A rank of the sender and one of the receiver.
Pair = tuple[int, int]


class HostOnly:
    """A fabric for GPU memory where no network card is: the double's memory is this process's too,
    so that what carries its bytes is a real fabric, for host memory. Notes what it is given.
    """

    def __init__(self) -> None:
        #: Of each region's parts: GPU, bytes, and whether the DMA-BUF is the memory at the address.
        self.registered: list[list[tuple[int, int, bool]]] = []

    def __call__(
        self, *, provider: Provider, bind_host: Sequence[str], options: FabricOptions
    ) -> Fabric:
        assert options.device_memory
        host_only = dataclasses.replace(options, device_memory=False)
        fabric = open_fabric(provider=provider, bind_host=bind_host, options=host_only)
        register = fabric.register_parts

        def note(parts: Sequence[MemoryPart]) -> int:
            self.registered.append([_noted(part) for part in parts])
            return register([dataclasses.replace(part, device=None) for part in parts])

        fabric.register_parts = note  # type: ignore[method-assign]
        return fabric


def _noted(part: MemoryPart) -> tuple[int, int, bool]:
    assert part.device is not None and part.device.dmabuf_offset == 0
    last = part.num_bytes - 1
    with mmap.mmap(part.device.dmabuf_fd, part.num_bytes) as dmabuf:
        before = dmabuf[last]
        write(part.address + last, bytes([before ^ 1]))
        is_it = dmabuf[last] == before ^ 1
        write(part.address + last, bytes([before]))
    return part.device.cuda_device, part.num_bytes, is_it


def hub_of(memory: NodeMemory, opener: HostOnly) -> FabricHub:
    """As a node makes it."""
    mapped = MappedMemory(
        kv_parts=memory.kv_parts(),
        progress_addresses=memory.progress_addresses,
        progress_eventfds=memory.progress_eventfds,
    )
    return FabricHub(mapped, FabricOptions(), opener=opener)


async def carry(sender: FabricHub, receiver: FabricHub, rank_pairs: Sequence[Pair]) -> int:
    """Write page 5 of the sender's ranks to page 7 of the receiver's; the atoms counted."""
    arrived: asyncio.Queue[FabricEvent] = asyncio.Queue()
    out = sender.open_link("tcp", "127.0.0.1", lambda event: None)
    into = receiver.open_link("tcp", "127.0.0.1", arrived.put_nowait)
    out.fabric.connect(out.link, into.fabric.descriptor(into.link))
    into.fabric.connect(into.link, out.fabric.descriptor(out.link))
    into.fabric.expect(into.link, 1, 1, len(rank_pairs) * RANK.num_layers)
    transfer = out.fabric.open_transfer(out.link, 1, 1)
    layout = layout_of(2, cumem.granularity_bytes(0))
    for src_rank, dst_rank in rank_pairs:
        batch = PageBatch(
            src_pages=np.array([5], np.uint32),
            dst_pages=np.array([7], np.uint32),
            page_bytes=RANK.page_bytes,
            num_layers=RANK.num_layers,
            src_offset=layout.rank_offset_bytes(0, src_rank),
            dst_offset=layout.rank_offset_bytes(0, dst_rank),
            src_layer_stride=RANK.layer_stride_bytes,
            dst_layer_stride=RANK.layer_stride_bytes,
        )
        out.fabric.write(transfer, batch)
    out.fabric.seal(transfer)
    async with asyncio.timeout(20):
        while not isinstance(event := await arrived.get(), Arrived):
            pass
    return int(event.arrival_atoms[-1])


@dataclasses.dataclass
class GpuNode:
    """A rank's memory on each of these GPUs, and their primary's mapping."""

    gpus: tuple[int, ...]

    def __post_init__(self) -> None:
        self.made = [cumem.create_shared(rank_bytes(gpu), device=gpu) for gpu in self.gpus]
        fds = [os.dup(fd) for fd, _ in self.made]
        self.memory = node_memory(fds, list(self.gpus), cumem.granularity_bytes(self.gpus[0]))

    def pages(self, rank: int, page: int) -> list[int]:
        """Where a page of each layer lies, as the rank has it mapped."""
        start = self.made[rank][1].address + page * RANK.page_bytes
        return [start + layer * RANK.layer_stride_bytes for layer in range(RANK.num_layers)]

    def close(self) -> None:
        self.memory.close()
        for fd, mapped in self.made:
            mapped.close()
            os.close(fd)


def crossed(gpus: tuple[int, ...], rank_pairs: Sequence[Pair]) -> dict[str, Any]:
    """What a prefiller's ranks write into a decoder's; each node has a rank on each GPU."""
    before, fds_before, opener = live(), num_fds(), HostOnly()
    nodes = [GpuNode(gpus), GpuNode(gpus)]
    texts = {
        rank: [bytes([16 * rank + layer + 1]) * RANK.page_bytes for layer in range(RANK.num_layers)]
        for rank, _ in rank_pairs
    }
    for rank, pages in texts.items():
        for address, text in zip(nodes[0].pages(rank, 5), pages, strict=True):
            write(address, text)

    async def run() -> int:
        hubs = [hub_of(node.memory, opener) for node in nodes]
        try:
            return await carry(*hubs, rank_pairs)
        finally:
            for hub in hubs:
                hub.close()

    found = {
        "atoms": asyncio.run(run()),
        "registered": opener.registered,
        "arrived": all(
            [read(address, RANK.page_bytes) for address in nodes[1].pages(dst, 7)] == texts[src]
            for src, dst in rank_pairs
        ),
    }
    for node in nodes:
        node.close()
    return {**found, "unchanged": live() == before, "fds": num_fds() - fds_before}


def nodes_of_one_gpu_and_of_two() -> list[dict[str, Any]]:
    """Nodes of one GPU, then of two, whose ranks write to the other's first and second."""
    return [crossed((1,), [(0, 0)]), crossed((0, 1), [(0, 1), (1, 0)])]


if __name__ == "__main__":
    print(json.dumps(nodes_of_one_gpu_and_of_two()))
