"""Memory that a pass frees is there for the next pass, without page faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Faults of filling 128 MiB that were freed before; in a process of its own, since malloc cannot be
# set back. Without the call all 32,768 pages fault (fewer where the kernel hands out larger ones).
SCRIPT = """
import ctypes, resource, sys
from pdx.process.heap import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(16 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 16 << 20)
    for block in blocks:
        libc.free(block)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.parametrize(("how", "least", "most"), [("kept", 0, 100), ("plain", 1000, 10**6)])
def test_freed_blocks_are_filled_again_without_faults(how: str, least: int, most: int) -> None:
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True, cwd=root
    )
    assert least <= int(run.stdout) <= most
