"""Histories of the whole cluster: nothing is broken, and a seed is a history."""

from __future__ import annotations

import datetime
import gc

import pytest

from pdx.lab.sim.scenario import FaultKind, ScenarioOptions
from pdx.lab.sim.search import command_line, few_collections, run_history


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


def check(seeds: range, options: ScenarioOptions) -> None:
    for seed in seeds:
        outcome = run_history(seed, options)
        assert outcome.broken is None, f"{command_line(seed, options)}: {outcome.broken}"


def test_a_fixed_corpus_of_histories_breaks_nothing() -> None:
    check(range(50), ScenarioOptions())
    check(range(20), ScenarioOptions(num_prefillers=1, num_decoders=2))


def test_histories_of_the_day_break_nothing() -> None:
    """Other seeds each day; a failure names the command that repeats it."""
    first = datetime.datetime.now(datetime.UTC).date().toordinal() * 1000
    check(range(first, first + 30), ScenarioOptions(num_prefillers=2, num_decoders=2))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thousands_of_histories_break_nothing() -> None:
    check(range(10_000, 12_000), ScenarioOptions())


def test_a_node_that_is_killed_while_it_restarts_is_started_once() -> None:
    options = ScenarioOptions(only_requests=(12, 14), only_faults=(1, 4))
    check(range(10_612, 10_613), options)


@pytest.mark.parametrize("kind", list(FaultKind))
def test_no_kind_of_fault_breaks_an_invariant(kind: FaultKind) -> None:
    options = ScenarioOptions(faults=(kind,))
    check(range(3), options)


def test_collections_are_as_they_were_after_histories() -> None:
    before, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    with few_collections():
        assert gc.get_threshold() > before and gc.get_freeze_count() > num_frozen
    assert gc.get_threshold() == before
