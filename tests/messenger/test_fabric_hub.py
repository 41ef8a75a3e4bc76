"""Which addresses a node's fabrics are bound to."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from pdx.fabric import FabricOptions, MemoryPart
from pdx.fabric.descriptor import decode
from pdx.messenger.fabric_hub import FabricHub, MappedMemory


@pytest.mark.parametrize(
    ("bind_hosts", "num_domains"), [((), 1), (("127.0.0.1", "127.0.0.2", "127.0.0.3"), 3)]
)
async def test_a_link_has_every_address_that_the_node_was_given(
    bind_hosts: tuple[str, ...], num_domains: int
) -> None:
    memory = mmap.mmap(-1, 8192)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    eventfd = os.eventfd(0)
    mapped = MappedMemory(
        kv_parts=(MemoryPart(address=address, num_bytes=4096),),
        progress_addresses=(address + 4096,),
        progress_eventfds=(eventfd,),
    )
    hub = FabricHub(mapped, FabricOptions(), bind_hosts)
    try:
        first, second = (hub.open_link("tcp", "127.0.0.1", lambda _: None) for _ in range(2))
        assert len(decode(first.fabric.descriptor(first.link)).ends) == num_domains
        assert first.fabric is second.fabric
        shm = hub.open_link("shm", "127.0.0.1", lambda _: None)
        assert len(decode(shm.fabric.descriptor(shm.link)).ends) == 1
    finally:
        hub.close()
        os.close(eventfd)
