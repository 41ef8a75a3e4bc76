"""Cases that users of other systems have reported, where they need a network that obeys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from pdx.engine.decode_node import DecodeNode
from pdx.kv.pages import Proof
from pdx.lab.sim.history import History, Outcome
from pdx.lab.sim.scenario import (
    MILLISECOND_NS,
    Fault,
    FaultKind,
    Scenario,
    ScenarioOptions,
    draw_scenario,
)
from pdx.lab.sim.search import run_history
from pdx.messenger.decode_link import DecodeLink
from pdx.messenger.decode_side import TransferTimeouts

ONE = ScenarioOptions(num_prefillers=1, num_decoders=1, num_requests=1, num_faults=0)


def one_request(seed: int = 3) -> Scenario:
    """A prompt of 30 tokens, over tcp, to a prefiller and a decoder that share no cache yet."""
    scenario = draw_scenario(seed, ONE)
    request = dataclasses.replace(
        scenario.requests[0], token_ids=tuple(range(30)), max_tokens=4, prompt_logprobs=None
    )
    return dataclasses.replace(scenario, requests=(request,), provider="tcp")


def run_with(scenario: Scenario, after_ms: int, change: Callable[[History], None]) -> Outcome:
    history = History(scenario)
    history.loop.call_at_ns(after_ms * MILLISECOND_NS, history.end_calm)
    history.loop.call_at_ns(after_ms * MILLISECOND_NS, change, history)
    return history.run()


def test_writes_that_are_held_up_never_carry_another_prompts_pages() -> None:
    """The first transfer's writes take a second, its client leaves, and the prefiller has pages for
    two prompts: what reads a page keeps it, and what lands, lands where it is waited for.
    """
    scenario = draw_scenario(3, dataclasses.replace(ONE, num_requests=8))
    requests = tuple(
        dataclasses.replace(
            plan,
            at_ns=plan.number * 5 * MILLISECOND_NS,
            token_ids=tuple(range(100 * plan.number, 100 * plan.number + 30)),
            prompt_logprobs=None,
        )
        for plan in scenario.requests
    )
    shapes = {
        name: dataclasses.replace(
            shape, page_size=4, num_pages=16, prefix_cache=False, local_below=0, num_cards=1
        )
        for name, shape in scenario.nodes.items()
    }
    leaves = Fault(
        number=0, kind=FaultKind.ABORT, at_ns=4 * MILLISECOND_NS, duration_ns=0, target="0"
    )
    history = History(
        dataclasses.replace(
            scenario, requests=requests, nodes=shapes, faults=(leaves,), provider="tcp"
        )
    )
    normal = history.network.conditions
    slow = (1000 * MILLISECOND_NS, 1000 * MILLISECOND_NS)
    late = dataclasses.replace(normal, wire_ns=slow, completion_ns=slow)
    loop = history.loop
    loop.call_at_ns(51 * MILLISECOND_NS, lambda: setattr(history.network, "conditions", late))
    loop.call_at_ns(60 * MILLISECOND_NS, lambda: setattr(history.network, "conditions", normal))
    outcome = history.run()
    assert outcome.broken is None
    assert outcome.ends == {"aborted": 1, "finished": 7}


def test_lost_completions_pin_no_pages_for_ever() -> None:
    """Found by the simulator: the prefiller waited for them, with nobody to end the link."""

    def lose_all(history: History) -> None:
        conditions = history.network.conditions
        history.network.conditions = dataclasses.replace(conditions, completion_loss_rate=1.0)

    outcome = run_with(one_request(), 10, lose_all)
    assert outcome.broken is None
    assert outcome.ends == {"finished": 1}
    assert outcome.virtual_s > 10, "the clock for the last word has run out"


def test_a_write_that_cannot_be_posted_ends_in_tokens_all_the_same() -> None:
    def refuse_all(history: History) -> None:
        conditions = history.network.conditions
        history.network.conditions = dataclasses.replace(conditions, refusal_rate=1.0)

    outcome = run_with(one_request(), 10, refuse_all)
    assert outcome.broken is None
    assert outcome.ends == {"finished": 1}
    assert outcome.counters["prefills_retried"] == 1


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 1), (1, 4), (4, 2), (2, 4)])
@pytest.mark.parametrize("num_faults", [0, 5])
def test_any_ratio_of_ranks_gives_the_same_tokens(
    prefill_tp: int, decode_tp: int, num_faults: int
) -> None:
    """The model has two KV heads, so four ranks hold copies; each copy is compared."""
    for seed in range(2):
        scenario = draw_scenario(seed, ScenarioOptions(num_faults=num_faults))
        nodes = {
            name: dataclasses.replace(shape, tp_size=prefill_tp if name[0] == "p" else decode_tp)
            for name, shape in scenario.nodes.items()
        }
        outcome = History(dataclasses.replace(scenario, nodes=nodes)).run()
        assert outcome.broken is None
        if not num_faults:
            assert outcome.ends == {"finished": 20}


def test_requests_wait_for_slots_when_all_are_taken() -> None:
    """Three slots, ten prompts at once: the others wait until transfers give theirs back. They got
    a 503.
    """
    scenario = draw_scenario(3, dataclasses.replace(ONE, num_requests=10))
    requests = tuple(
        dataclasses.replace(plan, at_ns=0, token_ids=tuple(range(plan.number, plan.number + 30)))
        for plan in scenario.requests
    )
    shapes = {
        name: dataclasses.replace(shape, num_pages=512, max_num_seqs=16, local_below=0)
        for name, shape in scenario.nodes.items()
    }
    history = History(dataclasses.replace(scenario, requests=requests, nodes=shapes))
    taken: list[int] = []

    def look() -> None:
        counts = history.nodes["d0"].counts()
        taken.append(counts["slots_taken"])
        if counts["requests_waiting"] and counts["slots_taken"] == 3:
            waited.append(counts["requests_waiting"])

    waited: list[int] = []
    for after_ms in range(50, 70):
        history.loop.call_at_ns(after_ms * MILLISECOND_NS, look)
    outcome = history.run()
    assert outcome.broken is None
    assert outcome.ends == {"finished": 10}
    assert max(taken) == 3 and max(waited) >= 7
    assert not outcome.counters.get("prefills_here")


def test_a_cluster_of_thirty_nodes_serves_its_requests() -> None:
    """A small part of what `pdx sim --nodes 500x500 --requests 10000` runs."""
    options = ScenarioOptions(num_prefillers=15, num_decoders=15, num_requests=150, num_faults=10)
    outcome = run_history(0, options)
    assert outcome.broken is None
    assert outcome.ends["finished"] > 120


def test_writes_that_are_lost_with_their_completions_end_in_a_fence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody hears of them: the prefiller never says that it has posted all, and the count stays
    short. The clock for stalled writes ends the link; its fence gives the pages back.
    """
    proofs: list[Proof] = []
    settled = DecodeNode.transfer_settled

    def watched(node: DecodeNode, link: DecodeLink, transfer_id: int, proof: Proof) -> None:
        proofs.append(proof)
        settled(node, link, transfer_id, proof)

    monkeypatch.setattr(DecodeNode, "transfer_settled", watched)
    scenario = one_request()
    request = dataclasses.replace(scenario.requests[0], at_ns=0)
    history = History(dataclasses.replace(scenario, requests=(request,)))
    network, normal = history.network, history.network.conditions

    def slow_down() -> None:
        history.end_calm()
        slow = (300 * MILLISECOND_NS, 300 * MILLISECOND_NS)
        network.conditions = dataclasses.replace(normal, completion_loss_rate=1.0, wire_ns=slow)

    def lose_what_is_on_its_way() -> None:
        assert history.nodes["d0"].counts()["pages_in_flight"] > 0
        network.reset("p0", "d0", lost=True, reported_failed=False, reconnects=True)
        network.conditions = normal

    history.loop.call_at_ns(45 * MILLISECOND_NS, slow_down)
    history.loop.call_at_ns(200 * MILLISECOND_NS, lose_what_is_on_its_way)
    outcome = history.run()
    assert outcome.broken is None
    assert outcome.ends == {"finished": 1}
    assert outcome.counters["prefills_retried"] == 1
    assert proofs == [Proof.FENCED]
    stalled_s = TransferTimeouts().stalled_writes_s
    assert stalled_s < outcome.virtual_s < stalled_s + 3


def in_mid_transfer(history: History) -> bool:
    return history.nodes["d0"].counts()["transfers_open"] > 0


def test_a_prefillers_dead_rank_ends_its_node_and_its_requests_go_elsewhere() -> None:
    """The decoder hears of it at once, not from its beats."""
    history = History(one_request())
    killed_ns: list[int] = []

    def kill() -> None:
        if in_mid_transfer(history):
            history.end_calm()
            assert history.nodes["p0"].lose_rank()
            assert not history.nodes["p0"].lose_rank(), "it is dead already"
            killed_ns.append(history.loop.now_ns)
            call_later(2000, history.start_node, "p0")
        else:
            call_later(1, kill)

    def call_later(after_ms: int, callback: Callable[..., None], *args: object) -> None:
        history.loop.call_at_ns(history.loop.now_ns + after_ms * MILLISECOND_NS, callback, *args)

    call_later(50, kill)
    outcome = history.run()
    assert outcome.broken is None
    assert outcome.ends == {"finished": 1}
    # The prefiller counts it too, if it still hears the decoder's answer while it ends.
    counts = history.nodes["d0"].counts()
    assert counts["prefills_retried"] == counts["faults_peer_failed"] == 1
    ended_ns = history.clients[0].ended_ns
    assert ended_ns is not None
    assert ended_ns - killed_ns[0] < 100 * MILLISECOND_NS


def test_a_decoders_dead_rank_ends_its_node_and_the_prefiller_lets_go() -> None:
    scenario = one_request()
    rank = Fault(
        number=0,
        kind=FaultKind.RANK,
        at_ns=scenario.requests[0].at_ns + 2 * MILLISECOND_NS,
        duration_ns=1000 * MILLISECOND_NS,
        target="d0",
    )
    outcome = History(dataclasses.replace(scenario, faults=(rank,)), recorded=True).run()
    assert outcome.broken is None
    assert outcome.ends == {"cut off": 1}
    assert any("d0       has ended: the rank was killed" in line for line in outcome.lines)
    assert any("-> p0: goodbye" in line for line in outcome.lines)


def test_the_loss_of_one_of_two_cards_ends_the_link_and_no_request() -> None:
    """Each of a link's cards has beats of its own."""
    scenario = one_request()
    shapes = {
        name: dataclasses.replace(shape, num_cards=2) for name, shape in scenario.nodes.items()
    }
    cut = Fault(
        number=0,
        kind=FaultKind.CARD,
        at_ns=scenario.requests[0].at_ns + 2 * MILLISECOND_NS,
        duration_ns=4000 * MILLISECOND_NS,
        target="p0",
        other="d0",
        strength=0.1,
    )
    outcome = History(dataclasses.replace(scenario, nodes=shapes, faults=(cut,))).run()
    assert outcome.broken is None
    assert outcome.ends == {"finished": 1}
    assert outcome.counters["faults_no_beat"] >= 1
