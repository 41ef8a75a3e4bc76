"""The line that says what a node does per second."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from pdx.engine import throughput
from pdx.engine.throughput import Throughput
from pdx.kv.pages import PagePool
from pdx.request.request import SamplingParams
from pdx.scheduler.scheduler import Scheduler, SchedulerLimits


def a_scheduler() -> Scheduler:
    limits = SchedulerLimits(page_size=4, chunk_len=8, max_num_seqs=4, reserve_output_len=4)
    return Scheduler(limits, PagePool(10))


async def periods(node: Throughput, caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What is logged in a few periods."""
    caplog.set_level(logging.INFO, throughput.__name__)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await node.report()
    return caplog.records


async def test_an_idle_node_says_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "_PERIOD_S", 0.01)
    assert not await periods(Throughput(a_scheduler()), caplog)


async def test_a_node_with_work_says_what_it_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "_PERIOD_S", 0.01)
    scheduler = a_scheduler()
    for request_id in range(5):
        scheduler.submit(request_id, [1] * 8, SamplingParams(max_tokens=4))
    node = Throughput(scheduler)
    for sequence in scheduler.admit():
        node.on_admitted(8, 2 if sequence.request_id else 0)
    first, *_ = await periods(node, caplog)
    fields = vars(first)["fields"]
    assert (fields["running"], fields["waiting"]) == (3, 2)
    assert fields["pages_in_use"] == 0.9
    assert fields["prefix_hit_rate"] == round(4 / 24, 4)
    assert fields["prompt_tokens_per_s"] == fields["generated_tokens_per_s"] == 0.0
    assert "running 3, waiting 2" in first.getMessage()
