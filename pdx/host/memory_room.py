"""Whether what nodes take of a host's memory fits in it. Pure; no torch.

Weights lie in each rank's own memory, KV pages in anonymous files (``memfd``), which count against
the host's memory and the cgroup's, never against the size of /dev/shm. Both are taken page by page
as they are written, so without this look a node that can never fill its KV cache would start, and
be killed in the middle of its work.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdx.errors import ConfigError

__all__ = ["MemoryFacts", "MemoryLimit", "MemoryNeed", "check_memory"]

_GIB, _MIB = 1 << 30, 1 << 20
#: A hint's share for KV of what the weights leave; the rest is for activations and processes.
_KV_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """One bound on memory, and what is left below it."""

    #: For a message: "this host's memory of 23.5 GiB".
    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What a host allows."""

    #: Limits that hold for all processes together: the host's memory, each cgroup's.
    shared: tuple[MemoryLimit, ...]
    #: Addresses of one process (RLIMIT_AS); None: no limit.
    process_bytes: int | None = None
    #: One file (RLIMIT_FSIZE), a rank's KV memory being one.
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What nodes take that are alike."""

    num_nodes: int
    num_ranks: int
    #: What a rank's weights take.
    weight_bytes: int
    kv_bytes: int

    @property
    def all_ranks(self) -> int:
        """How many ranks all nodes have."""
        return self.num_nodes * self.num_ranks

    @property
    def total_bytes(self) -> int:
        """What all nodes' ranks take."""
        return self.all_ranks * (self.weight_bytes + self.kv_bytes)


def check_memory(need: MemoryNeed, facts: MemoryFacts) -> None:
    """Whether the nodes fit.

    Raises:
        ConfigError: they do not; it says what is asked, what is there, and what would fit. (Exit 1:
            nothing is wrong with the command line.)
    """
    limits = list(facts.shared)
    tightest = min(limits, key=lambda limit: limit.free_bytes, default=None)
    if tightest is not None and need.total_bytes > tightest.free_bytes:
        raise _refused(
            f"{_who(need)} {_gib(need.total_bytes)} of memory ({_parts(need)}), and "
            f"{_gib(tightest.free_bytes)} of {tightest.name} is free",
            tightest.free_bytes // need.all_ranks - need.weight_bytes,
            "not even the weights fit: free memory, or use a smaller model",
        )
    # The primary maps the KV memory of all of its ranks; a rank has its own and its weights.
    kv_bytes = need.kv_bytes * need.num_ranks
    of_process = max(kv_bytes, need.weight_bytes + need.kv_bytes)
    if facts.process_bytes is not None and of_process > facts.process_bytes:
        raise _refused(
            f"a process of this node maps {_gib(of_process)} of weights and KV cache, and may have "
            f"{_gib(facts.process_bytes)} of addresses (RLIMIT_AS, ulimit -v)",
            min(facts.process_bytes - need.weight_bytes, facts.process_bytes // need.num_ranks),
            "raise the limit (ulimit -v unlimited)",
        )
    if facts.file_bytes is not None and need.kv_bytes > facts.file_bytes:
        raise _refused(
            f"a rank's KV cache of {_gib(need.kv_bytes)} is a file in memory, and a file may have "
            f"{_gib(facts.file_bytes)} (RLIMIT_FSIZE, ulimit -f)",
            facts.file_bytes,
            "raise the limit (ulimit -f unlimited)",
        )


def _who(need: MemoryNeed) -> str:
    if need.num_nodes == 1:
        return "this node takes"
    return f"{need.num_nodes} nodes on this host take"


def _parts(need: MemoryNeed) -> str:
    weights, kv = need.all_ranks * need.weight_bytes, need.all_ranks * need.kv_bytes
    ranks = "" if need.all_ranks == 1 else f" in {need.all_ranks} ranks"
    return f"{_gib(weights)} of weights and {_gib(kv)} of KV cache{ranks}"


def _refused(message: str, left_bytes: int, otherwise: str) -> ConfigError:
    kv_mib = int(left_bytes * _KV_SHARE) // _MIB
    hint = f"--kv-memory {kv_mib}M would fit, for each rank (or so many fewer --pages)"
    error = ConfigError(message, hint=hint if kv_mib > 0 else otherwise)
    error.exit_code = 1
    return error


def _gib(num_bytes: int) -> str:
    if num_bytes < _GIB // 10:
        return f"{num_bytes / _MIB:,.1f} MiB"
    return f"{num_bytes / _GIB:,.1f} GiB"
