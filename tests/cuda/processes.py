"""What the cuMem tests run in processes of their own: `python -m tests.cuda.processes NAME ...`.

A process has one driver, so the double and the real one cannot meet in the tests' own. What a
scenario found is the JSON that it prints.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from pdx.errors import PdxError
from pdx.kv import cumem
from pdx.kv.layout import KvLayout, NodeLayout
from pdx.kv.progress import PROGRESS_BYTES
from pdx.ranks.memory import NodeMemory, RankDescriptors

#: 4.5 MiB, so that it does not end where a granule does.
RANK = KvLayout(
    num_layers=3, num_kv_heads=2, head_dim=64, page_size=16, num_pages=96, itemsize=4, num_parts=2
)


def num_fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def live() -> list[int] | None:
    """Allocations, handles, mappings, reservations of this process; a real driver does not tell."""
    lib = ctypes.CDLL("libcuda.so.1")
    if not hasattr(lib, "double_live"):
        return None
    counts = (ctypes.c_int * 4)()
    lib.double_live(counts)
    return list(counts)


def node_memory(kv_fds: list[int], devices: list[int], alignment: int) -> NodeMemory:
    ranks = []
    for kv_fd, device in zip(kv_fds, devices, strict=True):
        progress = os.memfd_create("progress")
        os.ftruncate(progress, PROGRESS_BYTES)
        ranks.append(
            RankDescriptors(
                kv_fd=kv_fd,
                progress_fd=progress,
                progress_eventfd=os.eventfd(0),
                cuda_device=device,
            )
        )
    return NodeMemory(ranks, layout_of(len(ranks), alignment))


def layout_of(num_ranks: int, alignment: int) -> NodeLayout:
    return NodeLayout(rank=RANK, tp_size=num_ranks, num_kv_heads=4, alignment=alignment)


def check(answer: tuple[Any, ...]) -> Any:
    assert answer[0] == driver.CUresult.CUDA_SUCCESS, answer
    return answer[1] if len(answer) > 1 else None


def enter(device: int) -> None:
    """Copies need a context; what is tested does not."""
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))


def write(address: int, data: bytes) -> None:
    check(driver.cuMemcpyHtoD(address, data, len(data)))


def read(address: int, num_bytes: int) -> bytes:
    data = bytes(num_bytes)
    check(driver.cuMemcpyDtoH(data, address, num_bytes))
    return data


def rank_bytes(device: int) -> int:
    granule = cumem.granularity_bytes(device)
    return -(-RANK.total_bytes // granule) * granule


def rank(sock_fd: str, device_text: str, name: str) -> None:
    """Make memory, sign it, pass it; answer with what the primary wrote at its end."""
    sock = socket.socket(fileno=int(sock_fd))
    device = int(device_text)
    fd, memory = cumem.create_shared(rank_bytes(device), device=device)
    enter(device)
    write(memory.address, name.encode())
    socket.send_fds(sock, [b"\0"], [fd])
    os.close(fd)
    sock.recv(1)
    written = read(memory.address + RANK.total_bytes - 5, 5)
    memory.close()
    sock.sendall(json.dumps([written.decode(), live()]).encode())


def life() -> dict[str, Any]:
    """Two ranks and a primary. One rank ends by itself, the other one is killed."""
    cumem.granularity_bytes(0)
    count = check(driver.cuDeviceGetCount())
    devices = [0, min(1, count - 1)]
    for device in devices:
        enter(device)
    fds_before = num_fds()
    socks, processes, kv_fds = [], [], []
    for device, name in zip(devices, ("first", "other"), strict=True):
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", __spec__.name, "rank", str(theirs.fileno())]
            processes.append(
                subprocess.Popen([*command, str(device), name], pass_fds=[theirs.fileno()])
            )
        socks.append(ours)
        kv_fds += socket.recv_fds(ours, 1, 1)[1]
    memory = node_memory(kv_fds, devices, cumem.granularity_bytes(0))
    stride = rank_bytes(0)
    found: dict[str, Any] = {
        "signed": [read(memory.kv_address + i * stride, 5).decode() for i in (0, 1)],
        "mapped": live(),
    }
    write(memory.kv_address + RANK.total_bytes - 5, b"hello")
    socks[0].sendall(b"\0")
    found["rank"] = json.loads(socks[0].recv(4096))
    processes[1].kill()
    for process in processes:
        process.wait()
    found["after_ranks"] = [read(memory.kv_address + i * stride, 5).decode() for i in (0, 1)]
    memory.close()
    memory.close()
    for sock in socks:
        sock.close()
    return {**found, "live": live(), "fds": num_fds() - fds_before}


def granularity() -> dict[str, Any]:
    """A primary that takes a rank's memory for one of the host's pages."""
    fd, made = cumem.create_shared(rank_bytes(0), device=0)
    before, fds_before = live(), num_fds()
    error = None
    try:
        node_memory([os.dup(fd)], [0], mmap.PAGESIZE)
    except PdxError as refused:
        error = str(refused)
    unchanged = live() == before and num_fds() == fds_before
    made.close()
    os.close(fd)
    return {"error": error, "unchanged": unchanged, "live": live()}


# ---- on the double only ----


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pdx.kv.cumem")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def one_life() -> None:
    """All of the product's calls, as a rank and as its primary."""
    fd, made = cumem.create_shared(rank_bytes(0), device=0)
    try:
        alignment = cumem.granularity_bytes(0)
        memory = node_memory([os.dup(fd)], [0], alignment)
        try:
            memory.kv_parts()
        finally:
            memory.close()
    finally:
        made.close()
        os.close(fd)


def attempt(lib: ctypes.CDLL, nth_call: int, result: int) -> dict[str, Any]:
    """One life in which the nth call fails."""
    before, fds_before = live(), num_fds()
    assert before is not None
    error = None
    lib.double_fail(nth_call, result)
    with warnings() as lines:
        try:
            one_life()
        except PdxError as raised:
            error = raised
    lib.double_fail(0, 0)
    after = live()
    assert after is not None
    return {
        "call": lib.double_failed_at().decode(),
        "error": error and [type(error).__name__, str(error), error.hint],
        "logged": lines,
        "leaked": [now - was for now, was in zip(after, before, strict=True)],
        "fds": num_fds() - fds_before,
    }


def faults() -> list[dict[str, Any]]:
    """A life for each call of a life, which fails; the first one has cuInit fail."""
    lib = ctypes.CDLL("libcuda.so.1")
    lib.double_failed_at.restype = ctypes.c_char_p
    no_device, out_of_memory = 100, 2
    found = [attempt(lib, 1, no_device)]
    one_life()
    lib.double_fail(0, 0)
    one_life()
    num_calls = lib.double_calls()
    return found + [attempt(lib, nth, out_of_memory) for nth in range(1, num_calls + 1)]


def devices() -> dict[str, list[str | None]]:
    """What is said of a device that is not there or lacks an attribute."""
    lib = ctypes.CDLL("libcuda.so.1")
    found: dict[str, list[str | None]] = {}
    for case, device, lacking in (
        ("absent", 7, 0),
        ("no virtual memory", 1, 102),
        ("no descriptors", 1, 103),
        ("no GPUDirect", 1, 110),
        ("no DMA-BUF", 1, 124),
    ):
        lib.double_lack(lacking)
        found[case] = []
        try:
            fd, made = cumem.create_shared(4 << 20, device=device)
            with contextlib.closing(made):
                os.close(fd)
                os.close(cumem.export_dmabuf(made.address, 4 << 20, device=device))
        except PdxError as error:
            found[case] = [type(error).__name__, str(error), error.hint]
    return found


def driverless() -> list[str | None]:
    try:
        cumem.granularity_bytes(0)
    except PdxError as error:
        return [type(error).__name__, str(error), error.hint]
    return []


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank(*sys.argv[2:])
    else:
        scenario = {s.__name__: s for s in (life, granularity, faults, devices, driverless)}
        print(json.dumps(scenario[sys.argv[1]]()))
