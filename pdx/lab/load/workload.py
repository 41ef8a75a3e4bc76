"""What is asked of a server, and when: lengths, arrival times, prompts. All from a seed; pure."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdx.errors import ConfigError

__all__ = ["Job", "Lengths", "TraceRow", "Workload", "jobs", "read_trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A log-normal distribution of lengths."""

    #: Tokens.
    mean: float
    #: Standard deviation of the length's logarithm; 0: all are equal.
    sigma: float

    def draw(self, rng: random.Random) -> int:
        """One length, at least 1."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(rng.lognormvariate(mu, self.sigma)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """A request of a trace."""

    prompt_len: int
    output_len: int
    #: Seconds since the trace's first request.
    arrival_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A run's requests."""

    prompt: Lengths
    output: Lengths
    #: Instead of the distributions.
    trace: Sequence[TraceRow] | None = None
    #: Requests a second, Poisson arrivals; None: a trace's own arrivals, or a closed loop.
    rate: float | None
    #: Requests in flight in a closed loop; None: an open loop.
    concurrency: int | None
    num_requests: int | None
    duration_s: float | None
    #: Prompts are drawn from these token ids (low, high).
    token_ids: tuple[int, int]
    #: Prompt and output together are cut to this; None: not at all.
    context_len: int | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to send."""

    index: int
    #: Seconds since the run's start; None: as soon as a place is free.
    arrival_s: float | None
    output_len: int
    prompt_ids: list[int]


def jobs(workload: Workload, round_idx: int = 0) -> Iterator[Job]:
    """The requests of a round, in order of arrival. Both servers of a comparison get the same."""
    rng = random.Random(f"{workload.seed}/{round_idx}")
    arrival_s = 0.0
    for index in itertools.count():
        if index == workload.num_requests:
            return
        row = _row(workload, index, rng)
        if row is None:
            return
        if workload.rate is not None:
            arrival_s += rng.expovariate(workload.rate)
        elif row.arrival_s is not None:
            arrival_s = row.arrival_s
        open_loop = workload.concurrency is None
        if open_loop and workload.duration_s is not None and arrival_s >= workload.duration_s:
            return
        yield _job(workload, index, row, arrival_s if open_loop else None, rng)


def _row(workload: Workload, index: int, rng: random.Random) -> TraceRow | None:
    if workload.trace is not None:
        return workload.trace[index] if index < len(workload.trace) else None
    prompt_len, output_len = workload.prompt.draw(rng), workload.output.draw(rng)
    return TraceRow(prompt_len=prompt_len, output_len=output_len, arrival_s=None)


def _job(
    workload: Workload, index: int, row: TraceRow, arrival_s: float | None, rng: random.Random
) -> Job:
    prompt_len, output_len = row.prompt_len, row.output_len
    if workload.context_len is not None:
        prompt_len = min(prompt_len, workload.context_len - 1)
        output_len = min(output_len, workload.context_len - prompt_len)
    low, high = workload.token_ids
    prompt_ids = rng.choices(range(low, high + 1), k=prompt_len)
    return Job(index=index, arrival_s=arrival_s, output_len=output_len, prompt_ids=prompt_ids)


def read_trace(path: Path) -> list[TraceRow]:
    """Read a trace: lines of JSON with ``prompt_tokens``, ``output_tokens`` and, in all lines or
    in none, ``arrival_s``.

    Raises:
        ConfigError: the file cannot be read, or a line is no such object.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    rows = [
        _trace_row(f"{path}, line {number}", line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    times = [row.arrival_s for row in rows if row.arrival_s is not None]
    if not rows or (times and (len(times) < len(rows) or times != sorted(times))):
        raise ConfigError(
            f"{path}: {'arrival_s must be in all lines and rising' if rows else 'no requests'}"
        )
    return [
        TraceRow(
            prompt_len=row.prompt_len,
            output_len=row.output_len,
            arrival_s=None if row.arrival_s is None else row.arrival_s - times[0],
        )
        for row in rows
    ]


def _trace_row(place: str, line: str) -> TraceRow:
    try:
        fields = json.loads(line)
        arrival = fields.get("arrival_s")
        row = TraceRow(
            prompt_len=int(fields["prompt_tokens"]),
            output_len=int(fields["output_tokens"]),
            arrival_s=None if arrival is None else float(arrival),
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{place} is no request: {line[:80]}",
            hint='write {"prompt_tokens": 100, "output_tokens": 20, "arrival_s": 0.5}',
        ) from error
    if row.prompt_len < 1 or row.output_len < 1:
        raise ConfigError(f"{place}: lengths must be at least 1")
    return row
