"""Histories of the whole cluster: nothing is broken, and a seed is a history."""

from __future__ import annotations

import pytest

from pdx.sim.scenario import FaultKind, ScenarioOptions
from pdx.sim.search import run_history


@pytest.mark.parametrize("nodes", [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_without_faults_every_request_gets_all_its_tokens(nodes: tuple[int, int]) -> None:
    num_prefillers, num_decoders = nodes
    options = ScenarioOptions(
        num_prefillers=num_prefillers, num_decoders=num_decoders, num_faults=0
    )
    for seed in range(4):
        outcome = run_history(seed, options)
        assert outcome.broken is None
        assert outcome.ends == {"finished": 20}


def test_the_same_seed_is_the_same_history() -> None:
    options = ScenarioOptions()
    first, second = (run_history(7, options, recorded=True) for _ in range(2))
    assert first.lines == second.lines and len(first.lines) > 100
    assert first.lines != run_history(8, options, recorded=True).lines


@pytest.mark.parametrize("kind", list(FaultKind))
def test_no_kind_of_fault_breaks_an_invariant(kind: FaultKind) -> None:
    options = ScenarioOptions(faults=(kind,))
    for seed in range(3):
        outcome = run_history(seed, options)
        assert outcome.broken is None, f"pdx sim --seed {seed} --faults {kind}: {outcome.broken}"
