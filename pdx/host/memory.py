"""What this host allows of memory, read from /proc, cgroups and limits of the process. No torch."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from pdx.host.memory_room import MemoryFacts, MemoryLimit

__all__ = ["cgroup_limits", "host_limits", "read_memory_facts"]

_GIB = 1 << 30
_STRICT_OVERCOMMIT = "2"


def read_memory_facts(proc: Path = Path("/proc")) -> MemoryFacts:
    """Now, for this process and those that it starts. What cannot be read is no limit."""
    return MemoryFacts(
        shared=(*host_limits(proc), *cgroup_limits(proc)),
        process_bytes=_resource_limit(resource.RLIMIT_AS),
        file_bytes=_resource_limit(resource.RLIMIT_FSIZE),
    )


def host_limits(proc: Path) -> Iterator[MemoryLimit]:
    """The memory that is available, and under strict overcommit what may still be promised."""
    fields = _numbers(proc / "meminfo", unit=1024)
    total, available = fields.get("MemTotal"), fields.get("MemAvailable")
    if total is not None and available is not None:
        name = f"this host's memory of {total / _GIB:,.1f} GiB"
        yield MemoryLimit(name=name, free_bytes=available)
    promised, most = fields.get("Committed_AS"), fields.get("CommitLimit")
    is_strict = _text(proc / "sys/vm/overcommit_memory") == _STRICT_OVERCOMMIT
    if is_strict and promised is not None and most is not None:
        name = f"what may be promised (vm.overcommit_memory is 2: {most / _GIB:,.1f} GiB)"
        yield MemoryLimit(name=name, free_bytes=max(0, most - promised))


def cgroup_limits(proc: Path) -> Iterator[MemoryLimit]:
    """The limits of this process's cgroups, from its own up to the root: all of them hold.
    Both versions, also side by side. What is charged for files' pages is free: the kernel drops
    those pages before it refuses any.
    """
    for is_v2, mount, root in _mounts(proc):
        group = _group(proc, is_v2=is_v2)
        if group is None:
            continue
        # In a container the mount may show only a part of the host's tree.
        below = group.removeprefix(root) if group.startswith(root) else ""
        folder = mount / below.strip("/")
        while True:
            yield from _limit_of(folder, is_v2=is_v2)
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent


def _limit_of(folder: Path, *, is_v2: bool) -> Iterator[MemoryLimit]:
    names = ("memory.max", "memory.current", "") if is_v2 else _V1_FILES
    most, used = _number(folder / names[0]), _number(folder / names[1])
    if most is None or used is None or most >= _V1_NO_LIMIT:
        return
    stat = _numbers(folder / "memory.stat", unit=1)
    files = sum(stat.get(names[2] + kind, 0) for kind in ("inactive_file", "active_file"))
    yield MemoryLimit(
        name=f"the {most / _GIB:,.1f} GiB of cgroup {folder}",
        free_bytes=max(0, most - used + files),
    )


_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
#: Version 1 writes "none" as the largest number of whole pages.
_V1_NO_LIMIT = 1 << 62


def _mounts(proc: Path) -> Iterator[tuple[bool, Path, str]]:
    """Trees that account for memory: whether version 2, where mounted, and which part of the
    tree that is.
    """
    for line in (_text(proc / "self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        root = fields[3].rstrip("/")
        if kinds[0] == "cgroup2":
            yield True, Path(fields[4]), root
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            yield False, Path(fields[4]), root


def _group(proc: Path, *, is_v2: bool) -> str | None:
    """This process's place in the tree."""
    for line in (_text(proc / "self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (number == "0" and not controllers) if is_v2 else "memory" in controllers.split(","):
            return path
    return None


def _resource_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdigit() else None


def _numbers(path: Path, *, unit: int) -> dict[str, int]:
    """Lines of a name (with or without a colon) and a number."""
    found = {}
    for line in (_text(path) or "").splitlines():
        words = line.split()
        with contextlib.suppress(ValueError, IndexError):
            found[words[0].rstrip(":")] = int(words[1]) * unit
    return found
