"""When a node that ended is started again: bounded, with growing pauses, for any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.engine.restarts import RestartPolicy, Restarts

POLICY = RestartPolicy(most=4, first_pause_s=0.5, longest_pause_s=3.0, settled_s=100.0)
#: How long a node takes to start (None: it ends before it serves) and then serves.
LIVES = st.lists(
    st.tuples(st.floats(0, 50), st.none() | st.floats(0, 300)), min_size=1, max_size=30
)


@given(lives=LIVES, most=st.integers(0, 6))
def test_between_two_long_services_a_node_is_started_again_so_often_at_most(
    lives: list[tuple[float, float | None]], most: int
) -> None:
    policy = RestartPolicy(most=most, first_pause_s=0.5, longest_pause_s=3.0, settled_s=100.0)
    restarts, now_s, in_a_row = Restarts(policy=policy), 0.0, 0
    pauses: list[float] = []
    for start_s, service_s in lives:
        now_s += start_s
        if service_s is not None:
            restarts = restarts.ready(now_s)
            began_s, now_s = now_s, now_s + service_s
            if now_s - began_s >= policy.settled_s:
                in_a_row, pauses = 0, []
        restarts, pause_s = restarts.ended(now_s)
        assert (pause_s is None) == (in_a_row == most)
        if pause_s is None:
            return
        assert policy.first_pause_s <= pause_s <= policy.longest_pause_s
        assert pauses == sorted(pauses)
        pauses.append(pause_s)
        in_a_row, now_s = in_a_row + 1, now_s + pause_s


def test_pauses_double_up_to_the_longest() -> None:
    restarts, pauses = Restarts(policy=POLICY), []
    for now_s in range(5):
        restarts, pause_s = restarts.ended(float(now_s))
        pauses.append(pause_s)
    assert pauses == [0.5, 1.0, 2.0, 3.0, None]


def test_a_node_that_has_served_for_long_is_as_good_as_new() -> None:
    restarts = Restarts(policy=POLICY)
    for _ in range(4):
        restarts, _ = restarts.ended(0.0)
    settled, almost = restarts.ready(10.0).ended(110.0), restarts.ready(10.0).ended(109.0)
    assert (settled[1], almost[1]) == (0.5, None)


def test_no_restart_at_all_where_none_is_wanted() -> None:
    policy = RestartPolicy(most=0)
    assert Restarts(policy=policy).ready(0.0).ended(1e9)[1] is None


@pytest.mark.parametrize("count", [64, 5000])
def test_pauses_are_bounded_after_any_number_of_restarts(count: int) -> None:
    policy = RestartPolicy(most=10_000)
    _, pause_s = Restarts(policy=policy, count=count).ended(0.0)
    assert pause_s == policy.longest_pause_s
