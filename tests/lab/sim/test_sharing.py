"""Which of several prefillers a decoder asks, and what it says of slow transfers."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence

import pytest

from pdx.lab.sim.history import History, Outcome
from pdx.lab.sim.scenario import MILLISECOND_NS, Scenario, ScenarioOptions, draw_scenario


def scenario_of(prompt_lens: Sequence[int], *, num_prefillers: int, gap_ms: int) -> Scenario:
    """Prompts that share nothing, one after the other, to one decoder; a pass has four tokens."""
    options = ScenarioOptions(
        num_prefillers=num_prefillers, num_decoders=1, num_requests=len(prompt_lens), num_faults=0
    )
    drawn = draw_scenario(3, options)
    requests = tuple(
        dataclasses.replace(
            request,
            at_ns=(2000 + i * gap_ms) * MILLISECOND_NS,
            token_ids=tuple(range(16)) * 3,
            max_tokens=2,
            cache_salt=str(i),
            prompt_logprobs=None,
        )
        for i, request in enumerate(drawn.requests)
    )
    requests = tuple(
        dataclasses.replace(request, token_ids=request.token_ids[:length])
        for request, length in zip(requests, prompt_lens, strict=True)
    )
    nodes = {
        name: dataclasses.replace(
            shape, local_below=0, max_num_seqs=16, page_size=4, num_pages=200, chunk_len=4
        )
        for name, shape in drawn.nodes.items()
    }
    return dataclasses.replace(drawn, requests=requests, nodes=nodes, provider="tcp", slot_bits=12)


def asked(scenario: Scenario) -> list[str]:
    """The prefiller of each prompt, in their order."""
    history = History(scenario, recorded=True)
    outcome = history.run()
    assert outcome.broken is None and set(outcome.ends) == {"finished"}
    asks = (re.search(r"d0 +-> (p\d): prefill ", line) for line in history.lines)
    return [found[1] for found in asks if found]


def test_prefillers_that_have_equally_much_to_do_take_turns() -> None:
    turns = asked(scenario_of([10] * 9, num_prefillers=3, gap_ms=500))
    assert set(turns[:3]) == {"p0", "p1", "p2"}
    assert turns == turns[:3] * 3


def test_the_prefiller_with_the_fewest_tokens_to_do_is_asked() -> None:
    """Three short ones together have fewer than the long one that came first."""
    first, *others = asked(scenario_of([48, 6, 6, 6], num_prefillers=2, gap_ms=1))
    assert len(others) == 3 and first not in others


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_warning_says_once_that_transfers_outlast_prefills(
    caplog: pytest.LogCaptureFixture, is_slow: bool
) -> None:
    scenario = scenario_of([30, 30], num_prefillers=1, gap_ms=2000)
    history = History(scenario)
    if is_slow:
        delay_ns = (300 * MILLISECOND_NS, 400 * MILLISECOND_NS)
        history.network.conditions = dataclasses.replace(
            history.network.conditions, wire_ns=delay_ns, completion_ns=delay_ns
        )
    with caplog.at_level(logging.WARNING, "pdx.engine.decode_node"):
        outcome: Outcome = history.run()
    assert outcome.broken is None and outcome.ends == {"finished": 2}
    warnings = [each for each in caplog.messages if "took longer than its prefill" in each]
    assert len(warnings) == is_slow
    assert all("--local-below" in each for each in warnings)
    assert outcome.counters.get("transfers_outlasting_prefills", 0) == 2 * is_slow
