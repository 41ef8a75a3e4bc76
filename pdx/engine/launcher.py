"""Where nodes run: the interface between the supervisor and what starts their processes.

`local` (:mod:`pdx.engine.local_launcher`) is the kind that there is: child processes of this one.
A cluster's scheduler can be another.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from pdx.engine.node_report import Loading, Ready

__all__ = ["Ended", "Ending", "Launcher", "NodeEvent", "NodeSpec", "Said", "Started"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One node, as it is to be run."""

    #: Unique among a launcher's nodes.
    name: str
    role: Literal["prefill", "decode"]
    #: Arguments of the `pdx` command.
    arguments: tuple[str, ...]
    #: Variables to set or (None) to take away, beside those of the launcher's own environment.
    env: Mapping[str, str | None]
    #: The variable that gives the node its address. A restarted node gets the one it had.
    address_variable: str
    #: Nodes of a higher stage are stopped before those of a lower one.
    stage: int


@dataclass(frozen=True, slots=True)
class Started:
    """The node's process begins."""


@dataclass(frozen=True, slots=True)
class Said:
    """The node has logged a line."""

    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The node's process has ended, and all of its own children have."""

    pid: int
    #: In words: "exited with code 1".
    how: str
    last_lines: tuple[str, ...]

    def describe(self, name: str, num_restarts: int) -> str:
        """What to tell the user, over several lines."""
        again = {0: "", 1: ", restarted once,"}.get(
            num_restarts, f", restarted {num_restarts} times,"
        )
        tail = "".join(f"\n  {line}" for line in self.last_lines)
        words = f"; its last lines:{tail}" if tail else ""
        return f"the {name} node (pid {self.pid}){again} {self.how}{words}"


NodeEvent: TypeAlias = Started | Said | Loading | Ready | Ended


class Ending(enum.Enum):
    """How a node is asked to end."""

    DRAIN = "it finishes what runs"
    NOW = "it gives up what runs"
    KILL = "it is not asked"


class Launcher(Protocol):
    """Starts, watches, replaces and stops nodes. Used by one task at a time for each node."""

    async def start(self, spec: NodeSpec) -> None:
        """Start a node; what becomes of it, :meth:`watch` says."""

    async def replace(self, spec: NodeSpec) -> None:
        """Start a node in place of the one of its name, of which nothing is left then."""

    async def stop(self, name: str, how: Ending, timeout_s: float) -> None:
        """Return when the node has ended. One that has not in time is killed. Cancelled, it leaves
        the node as it is.
        """

    def watch(self) -> AsyncIterator[tuple[str, NodeEvent]]:
        """What happens to the nodes, by name, in order. For one reader, who stops it."""
