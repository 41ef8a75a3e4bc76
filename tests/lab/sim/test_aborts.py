"""Clients that leave at every step of a request's life."""

from __future__ import annotations

import dataclasses

import pytest

from pdx.lab.sim.history import History, Outcome
from pdx.lab.sim.scenario import (
    MILLISECOND_NS,
    Fault,
    FaultKind,
    ScenarioOptions,
    draw_scenario,
)

OPTIONS = ScenarioOptions(num_prefillers=1, num_decoders=1, num_requests=2, num_faults=0)


def abort_after(at_ns: int, *, prompt_logprobs: int | None) -> Outcome:
    """Of two requests that come together, the first is left after a time."""
    scenario = draw_scenario(3, OPTIONS)
    first, second = (
        dataclasses.replace(
            plan,
            at_ns=plan.number * 100_000,
            token_ids=tuple(range(plan.number, 30 + plan.number)),
            max_tokens=4,
            prompt_logprobs=prompt_logprobs,
        )
        for plan in scenario.requests
    )
    abort = Fault(number=0, kind=FaultKind.ABORT, at_ns=at_ns, duration_ns=0, target="0")
    scenario = dataclasses.replace(scenario, requests=(first, second), faults=(abort,))
    return History(scenario).run()


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_a_client_may_leave_at_any_step(prompt_logprobs: int | None) -> None:
    """With scores: found by the simulator, a client that left while the prompt's last scores were
    on their way took the decoder down.
    """
    ends = set()
    for at_ns in range(0, 16 * MILLISECOND_NS, MILLISECOND_NS // 4):
        outcome = abort_after(at_ns, prompt_logprobs=prompt_logprobs)
        assert outcome.broken is None, f"after {at_ns} ns: {outcome.broken}"
        assert outcome.ends.get("finished", 0) + outcome.ends.get("aborted", 0) == 2
        ends |= outcome.ends.keys()
    assert ends == {"finished", "aborted"}


def test_the_next_request_is_served_after_a_cancel() -> None:
    outcome = abort_after(2 * MILLISECOND_NS, prompt_logprobs=None)
    assert outcome.ends == {"aborted": 1, "finished": 1}
