"""Sends a workload to a server and measures, from the client's side.

One event loop; a task for each request in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdx.lab.api import ApiError, error_of, events_async, headers
from pdx.lab.load.workload import Job

if TYPE_CHECKING:
    import httpx

__all__ = ["Outcome", "Target", "run_load", "try_once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and how to ask it."""

    base: str
    model: str
    api_key: str | None
    #: Longest time without a sign of the server, seconds.
    timeout_s: float


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one request. Times are seconds."""

    prompt_len: int
    #: How long after its time the client sent it: large when the client itself is too slow.
    late_s: float
    ttft_s: float | None = None
    #: Between two events of the stream; a server may put several tokens in one.
    gaps_s: list[float] = field(default_factory=list)
    e2e_s: float | None = None
    output_len: int = 0
    #: What kind of failure; None: it went well.
    error: str | None = None
    message: str = ""


async def run_load(
    target: Target,
    jobs: Iterator[Job],
    *,
    concurrency: int | None,
    duration_s: float | None,
    on_done: Callable[[Outcome], None],
) -> tuple[list[Outcome], float]:
    """Send all jobs; returns what became of them and how long it took, seconds.

    Args:
        concurrency: how many at a time; None: each at its arrival time, however many are running.
        duration_s: a closed loop sends nothing after this time.
    """
    outcomes: list[Outcome] = []
    async with _client(target) as client:
        began_s = time.monotonic()

        async def one(job: Job) -> None:
            due_s = began_s + job.arrival_s if job.arrival_s is not None else time.monotonic()
            outcome = await _request(client, target, job, due_s)
            outcomes.append(outcome)
            on_done(outcome)

        async def worker() -> None:
            for job in jobs:
                if duration_s is not None and time.monotonic() - began_s >= duration_s:
                    return
                await one(job)

        async with asyncio.TaskGroup() as group:
            if concurrency is not None:
                for _ in range(concurrency):
                    group.create_task(worker())
            else:
                for job in jobs:
                    assert job.arrival_s is not None
                    await asyncio.sleep(began_s + job.arrival_s - time.monotonic())
                    group.create_task(one(job))
        return outcomes, time.monotonic() - began_s


async def try_once(target: Target, job: Job) -> None:
    """One request whose figures nobody wants: is this a server that can be measured?

    Raises:
        ApiError: it is not.
    """
    async with _client(target) as client:
        outcome = await _request(client, target, job, time.monotonic())
    if outcome.error is not None:
        raise ApiError(
            f"{target.base} cannot be measured: {outcome.message}",
            kind=outcome.error,
            hint="the server must take token ids as prompts and ignore_eos, as pdx, vLLM and "
            "SGLang do; --token-ids must lie within its vocabulary",
        )


def _client(target: Target) -> httpx.AsyncClient:
    import httpx

    return httpx.AsyncClient(
        headers=headers(target.api_key),
        timeout=httpx.Timeout(target.timeout_s, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def _request(client: httpx.AsyncClient, target: Target, job: Job, due_s: float) -> Outcome:
    import httpx

    body = {
        "model": target.model,
        "prompt": job.prompt_ids,
        "max_tokens": job.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_s = time.monotonic()
    outcome = Outcome(prompt_len=len(job.prompt_ids), late_s=max(0.0, sent_s - due_s))
    try:
        async with client.stream("POST", f"{target.base}/completions", json=body) as answer:
            if answer.status_code != 200:
                raise error_of(answer.status_code, await answer.aread())
            await _measure(answer, outcome, sent_s)
        if outcome.ttft_s is None:
            raise ApiError("the stream brought no token", kind="stream")
    except ApiError as error:
        outcome.error, outcome.message = error.kind, error.message
    except httpx.TimeoutException:
        outcome.error = outcome.message = "timeout"
    except httpx.HTTPError as error:
        outcome.error, outcome.message = "connection", str(error) or type(error).__name__
    return outcome


async def _measure(answer: httpx.Response, outcome: Outcome, sent_s: float) -> None:
    last_s, num_events, counted = sent_s, 0, 0
    async for event in events_async(answer):
        counted = (event.get("usage") or {}).get("completion_tokens") or counted
        if not _brings_tokens(event):
            continue
        now_s = time.monotonic()
        if outcome.ttft_s is None:
            outcome.ttft_s = now_s - sent_s
        else:
            outcome.gaps_s.append(now_s - last_s)
        last_s, num_events = now_s, num_events + 1
    outcome.e2e_s = last_s - sent_s
    outcome.output_len = counted or num_events


def _brings_tokens(event: dict[str, Any]) -> bool:
    """Tokens whose characters are not complete yet come without text; an empty event that ends a
    choice brings none.
    """
    choices = event.get("choices") or []
    return any(choice.get("text") or not choice.get("finish_reason") for choice in choices)
