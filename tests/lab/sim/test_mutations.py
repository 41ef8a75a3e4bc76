"""The simulator finds bugs of the known kinds when they are planted in the real code."""

from __future__ import annotations

import pytest

from pdx.lab.sim.scenario import FaultKind, ScenarioOptions
from pdx.lab.sim.search import run_history
from tests.lab.sim.mutations import MUTATIONS

#: The faults that bring a bug to light, where not all kinds do, and the invariants that it breaks.
FOUND_BY: dict[str, tuple[str, set[str]]] = {
    "free_on_a_timer": ("abort,pause,slow,partition,reorder", {"live-target", "leased-target"}),
    "free_on_drained": ("abort,late,reorder,slow", {"live-target", "leased-target"}),
    "fence_by_key_only": ("", {"leased-target", "right-tokens"}),
    "forget_a_slot": ("", {"slots", "at-rest"}),
    "pair_from_the_wrong_end": ("", {"right-tokens"}),
    "reuse_without_a_generation": ("", {"slots"}),
    "credit_a_stale_imm": ("stray", {"leased-target", "live-target", "right-tokens"}),
    "repost_an_unknown_write": ("reset", {"leased-target", "right-tokens"}),
    "unpin_a_source_early": ("", {"live-source"}),
    "arm_after_dispatch": ("", {"calm"}),
}
#: These take hundreds of histories.
RARE = ("free_on_a_timer", "repost_an_unknown_write")


def find(name: str, most_histories: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, invariants = FOUND_BY[name]
    options = ScenarioOptions(num_faults=8)
    if kinds:
        options = ScenarioOptions(
            num_faults=8, faults=tuple(FaultKind(kind) for kind in kinds.split(","))
        )
    MUTATIONS[name](monkeypatch)
    for seed in range(most_histories):
        broken = run_history(seed, options).broken
        if broken is not None:
            assert broken.invariant in invariants, str(broken)
            return
    pytest.fail(f"{most_histories} histories have not found it")


@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in RARE])
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find(name, 1000, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", RARE)
def test_a_planted_bug_that_few_histories_meet_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(name, 1000, monkeypatch)


def test_nothing_is_found_where_nothing_is_planted() -> None:
    assert set(FOUND_BY) == set(MUTATIONS)
    for seed in range(10):
        assert run_history(seed, ScenarioOptions(num_faults=8)).broken is None
