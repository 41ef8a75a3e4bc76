"""Receive buffers stay off the heap, also after the first of them was freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

# How far the heap is from the kernel's blocks after a receive buffer was freed: in a process of its
# own, since malloc cannot be set back.
SCRIPT = """
import ctypes, sys
from pdx.process.heap import keep_receive_buffers_apart
if sys.argv[1] == "apart":
    keep_receive_buffers_apart()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
for _ in range(2):
    block = libc.malloc(256 << 10)
    on_heap = block < libc.sbrk(0)
    libc.free(block)
print(on_heap)
"""


@pytest.mark.parametrize(("how", "on_heap"), [("apart", "False"), ("plain", "True")])
def test_large_blocks_are_never_on_the_heap(how: str, on_heap: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == on_heap
