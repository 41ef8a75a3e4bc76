"""Where a prompt's KV cache is to come from when prefillers fail: every decision, in any state."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.config.node import RecoveryConfig
from pdx.engine.peer import backoffs
from pdx.engine.recovery import Ask, Breaker, Candidate, Place, decide

PAUSE_S = 5.0


@st.composite
def states(draw: st.DrawFn) -> tuple[RecoveryConfig, list[Candidate[int]], list[int], bool, float]:
    indices = draw(st.permutations(range(draw(st.integers(1, 4)))))
    prefillers = [
        Candidate(prefiller=idx, able=draw(st.booleans()), trusted=draw(st.booleans()))
        for idx in indices
    ]
    policy = RecoveryConfig(
        local_fallback=draw(st.booleans()), prefill_retries=draw(st.integers(0, 3))
    )
    failed = draw(st.lists(st.sampled_from(indices), max_size=5))
    return policy, prefillers, failed, draw(st.booleans()), draw(st.floats(0, 20))


def decision(
    state: tuple[RecoveryConfig, list[Candidate[int]], list[int], bool, float],
) -> Ask[int] | Place:
    policy, prefillers, failed, has_begun, waited_s = state
    return decide(policy, prefillers, failed=failed, has_begun=has_begun, waited_s=waited_s)


@given(states())
def test_only_a_prefiller_that_is_able_and_trusted_is_asked_and_not_too_often(
    state: tuple[RecoveryConfig, list[Candidate[int]], list[int], bool, float],
) -> None:
    policy, prefillers, failed, _, _ = state
    match decision(state):
        case Ask(prefiller=idx):
            [chosen] = [each for each in prefillers if each.prefiller == idx]
            assert chosen.able and chosen.trusted
            assert len(failed) <= policy.prefill_retries
            fresh = [p for p in prefillers if p.able and p.trusted and p.prefiller not in failed]
            assert not fresh or chosen is fresh[0], "one that has not failed it, first"


@given(states())
def test_a_stream_that_has_begun_is_never_failed_and_never_waits(
    state: tuple[RecoveryConfig, list[Candidate[int]], list[int], bool, float],
) -> None:
    policy, prefillers, failed, _, waited_s = state
    found = decision((policy, prefillers, failed, True, waited_s))
    assert found is Place.HERE or (isinstance(found, Ask) and not failed)


@given(states())
def test_with_local_fallback_nothing_waits_or_fails_and_without_it_nothing_new_runs_here(
    state: tuple[RecoveryConfig, list[Candidate[int]], list[int], bool, float],
) -> None:
    policy, _, _, has_begun, waited_s = state
    found = decision(state)
    if policy.local_fallback:
        assert found not in (Place.WAIT, Place.GIVE_UP)
    elif not has_begun:
        assert found is not Place.HERE
    if found is Place.WAIT:
        assert waited_s < policy.prefiller_wait_s


def test_failures_without_an_end_end_in_an_error() -> None:
    """One prefiller that fails everything, no local fallback."""
    policy = RecoveryConfig(local_fallback=False, prefill_retries=2)
    prefillers = [Candidate(prefiller=0, able=True, trusted=True)]
    failed: list[int] = []
    for _ in range(3):
        assert decide(policy, prefillers, failed=failed, has_begun=False, waited_s=0) == Ask(0)
        failed.append(0)
    found = decide(policy, prefillers, failed=failed, has_begun=False, waited_s=0)
    assert found is Place.GIVE_UP


def test_of_those_that_failed_it_the_one_is_asked_whose_failure_is_the_longest_ago() -> None:
    policy = RecoveryConfig(local_fallback=False, prefill_retries=5)
    prefillers = [Candidate(prefiller=idx, able=True, trusted=True) for idx in (2, 0, 1)]
    found = decide(policy, prefillers, failed=[1, 0, 2, 1], has_begun=False, waited_s=0)
    assert found == Ask(0)


def breaker() -> Breaker:
    return Breaker(failure_rate=0.5, pause_s=PAUSE_S)


def open_breaker() -> Breaker:
    opened = breaker()
    for _ in range(5):
        opened.on_failure(100.0)
    assert opened.is_open
    return opened


@pytest.mark.parametrize("num_failures", [0, 1, 4])
def test_a_few_failures_open_no_breaker(num_failures: int) -> None:
    few = breaker()
    for _ in range(num_failures):
        few.on_failure(0.0)
    assert few.allows(0.0)


def test_a_breaker_opens_at_its_share_of_failures_and_not_below() -> None:
    half = breaker()
    for _ in range(10):
        half.on_success()
    for i in range(10):
        assert half.allows(0.0), f"{i} of {10 + i} failed"
        half.on_failure(0.0)
    assert half.is_open and not half.allows(0.0)
    assert half.num_opened == 1


def test_an_open_breaker_lets_one_probe_through_after_its_pause_and_a_success_closes_it() -> None:
    half_open = open_breaker()
    assert not half_open.allows(100.0 + PAUSE_S - 0.1)
    assert half_open.allows(100.0 + PAUSE_S)
    half_open.on_asked()
    assert not half_open.allows(100.0 + 2 * PAUSE_S), "one at a time"
    half_open.on_success()
    assert half_open.allows(100.0 + PAUSE_S)
    half_open.on_failure(106.0)
    assert half_open.allows(106.0), "what was before it opened is forgotten"


def test_a_failed_probe_begins_another_pause() -> None:
    opened = open_breaker()
    opened.on_asked()
    opened.on_failure(100.0 + PAUSE_S)
    assert not opened.allows(100.0 + 2 * PAUSE_S - 0.1)
    assert opened.allows(100.0 + 2 * PAUSE_S)
    assert opened.num_opened == 1


def test_clients_that_leave_are_no_failures_and_leave_the_probe_to_another() -> None:
    left = breaker()
    for _ in range(20):
        left.on_asked()
        left.on_abort()
    assert left.allows(0.0)
    opened = open_breaker()
    opened.on_asked()
    opened.on_abort()
    assert opened.allows(100.0 + PAUSE_S)


def test_backoffs_double_up_to_two_seconds() -> None:
    found = list(itertools.islice(backoffs(), 8))
    assert found[:3] == [0.05, 0.1, 0.2]
    assert found[-2:] == [2.0, 2.0]
