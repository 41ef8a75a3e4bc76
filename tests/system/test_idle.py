"""What a pair of nodes costs while nobody asks for anything."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.system.conftest import Pair
from tests.system.nodes import Node

IDLE_S = 30.0


def _cpu_s(node: Node) -> dict[str, float]:
    """Processor time so far of each thread of all the node's processes."""
    taken = {}
    for pid in node.family():
        for task in Path(f"/proc/{pid}/task").iterdir():
            name = (task / "comm").read_text().strip()
            nanoseconds = int((task / "schedstat").read_text().split()[0])
            taken[f"{pid}/{task.name} {name}"] = nanoseconds / 1e9
    return taken


@pytest.mark.slow
def test_an_idle_node_uses_under_one_percent_of_a_core(pair: Pair) -> None:
    nodes = (pair.prefiller, pair.decoder)
    before = [_cpu_s(node) for node in nodes]
    time.sleep(IDLE_S)  # what is measured is that nothing happens
    for node, earlier in zip(nodes, before, strict=True):
        later = _cpu_s(node)
        spent = {name: later[name] - earlier.get(name, 0.0) for name in later}
        for name, seconds in sorted(spent.items(), key=lambda item: -item[1])[:6]:
            print(f"{pair.provider} {name}: {seconds / IDLE_S:.3%}")
        assert sum(spent.values()) < 0.01 * IDLE_S
