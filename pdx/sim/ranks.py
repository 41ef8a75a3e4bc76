"""The ranks of a simulated node: their memory, and passes that take time and compute what the
simulated model computes, from the KV that they find in their pages.

Runs on the virtual loop, in the node's process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdx.errors import WorkerError
from pdx.fabric import MemoryPart
from pdx.fabric.simulated import AddressSpace
from pdx.kv.layout import NodeLayout
from pdx.kv.progress import end_value, layer_value
from pdx.request.batch import (
    Batch,
    PromptScores,
    RequestStart,
    RequestStep,
    SampledToken,
    ScoredToken,
    StepOutput,
)
from pdx.sim.loop import VirtualLoop
from pdx.sim.model import SimulatedModel

__all__ = ["PassTimes", "SimulatedMemory", "SimulatedRanks"]

_WORD_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """How long a pass takes."""

    base_ns: int = 1_000_000
    token_ns: int = 50_000
    #: A pass takes up to this share longer, at random; a rank's progress is seen as much later.
    jitter: float = 0.5


class SimulatedMemory:
    """KV pages and progress words of a node's ranks, in a room's address space."""

    def __init__(self, space: AddressSpace, layout: NodeLayout) -> None:
        rank = layout.rank
        assert rank.token_run_bytes == _WORD_BYTES, "a token's part of a head is one word"
        assert layout.rank_stride_bytes % _WORD_BYTES == 0
        self._space = space
        self._words = np.zeros(layout.total_bytes // _WORD_BYTES, np.uint64)
        self._kv_bytes = layout.total_bytes
        self._kv_address = space.map(self._words)
        self._progress_address = space.map(bytearray(_WORD_BYTES * layout.tp_size))
        self.progress_addresses = tuple(
            self._progress_address + _WORD_BYTES * i for i in range(layout.tp_size)
        )
        #: Words are watched in a simulated room.
        self.progress_eventfds: tuple[int, ...] = ()
        shape = (rank.num_layers, rank.num_pages, rank.num_kv_heads, rank.num_parts, rank.page_size)
        stride, size = layout.rank_stride_bytes // _WORD_BYTES, rank.total_bytes // _WORD_BYTES
        #: Of each rank: [L, P, Hkv, part, S].
        self.ranks = [
            self._words[i * stride : i * stride + size].reshape(shape)
            for i in range(layout.tp_size)
        ]

    def store_progress(self, value: int, rank_idx: int) -> None:
        """A rank's progress, where the fabric's worker sees it."""
        self._space.store_word(self.progress_addresses[rank_idx], value)

    def kv_parts(self) -> tuple[MemoryPart, ...]:
        """One: all of it is the host's."""
        return (MemoryPart(address=self._kv_address, num_bytes=self._kv_bytes),)

    def close(self) -> None:
        """Forget the addresses."""
        self._space.unmap(self._kv_address)
        self._space.unmap(self._progress_address)


@dataclass(slots=True)
class _Request:
    start: RequestStart
    token_ids: list[int]
    num_computed: int
    pages: list[int] = field(default_factory=list)


class _Span(NamedTuple):
    """What a pass does for one request: positions from ``start``, and the states after each."""

    request: _Request
    start: int
    values: list[int]
    states: list[int]
    zero_rest: bool


class _Words(NamedTuple):
    """What a pass writes."""

    #: Of each token, [T]: its page and its place there.
    pages: NDArray[np.intp]
    offsets: NDArray[np.intp]
    #: Of each rank: [T, L, Hkv, part].
    kv: list[NDArray[np.uint64]]
    #: Pages, and from which token on they are zeroed.
    unused: list[tuple[int, int]]


def _head_shares(heads: list[range]) -> list[tuple[int, ...]]:
    """How many times what each rank holds of each of its heads counts in the state.

    Once all together; but that a replica differs must not go unseen, so the difference between it
    and the head's first holder counts, too.
    """
    replicas: dict[int, list[int]] = {}
    for rank_idx, own in enumerate(heads):
        for head in own:
            replicas.setdefault(head, []).append(rank_idx)
    factors = [2 * rank_idx + 1 for rank_idx in range(len(heads))]
    return [
        tuple(
            factors[rank_idx]
            if replicas[head][0] != rank_idx
            else 1 - sum(factors[other] for other in replicas[head][1:])
            for head in own
        )
        for rank_idx, own in enumerate(heads)
    ]


class SimulatedRanks:
    """See the module's docstring."""

    def __init__(
        self,
        loop: VirtualLoop,
        model: SimulatedModel,
        memory: SimulatedMemory,
        layout: NodeLayout,
        times: PassTimes,
        rng: random.Random,
    ) -> None:
        self._model = model
        self._memory = memory
        self._layout = layout
        self._times = times
        self._rng = rng
        self._requests: dict[int, _Request] = {}
        self._loop = loop
        self._end: asyncio.Future[WorkerError] = loop.create_future()
        page_size = layout.rank.page_size
        heads = [layout.heads(rank_idx) for rank_idx in range(layout.tp_size)]
        #: Of each rank: [L, Hkv, part].
        self._factors = [model.factors[:, own.start : own.stop] for own in heads]
        #: Of each rank, how much each word of a request's pages counts: [P, L, Hkv, part, S].
        self._weights = [
            model.word_weights(page_size, (own.start, own.stop), shares)
            for own, shares in zip(heads, _head_shares(heads), strict=True)
        ]
        #: Of each rank, its memory by page, [P, L, Hkv, part, S], and by token, [P, S, L, Hkv,
        #: part].
        self._by_page = [memory.transpose(1, 0, 2, 3, 4) for memory in memory.ranks]
        self._by_token = [memory.transpose(1, 4, 0, 2, 3) for memory in memory.ranks]

    async def died(self) -> WorkerError:
        return await asyncio.shield(self._end)

    async def stop(self) -> None:
        """Nothing runs between passes."""

    def kill(self) -> None:
        """A rank is killed."""
        if not self._end.done():
            self._end.set_result(WorkerError("the rank was killed"))

    async def run(self, batch: Batch) -> StepOutput:
        if self._end.done():
            raise self._end.result()
        for request_id in batch.removes:
            del self._requests[request_id]
        for start in batch.starts:
            request = _Request(start, list(start.token_ids), start.num_computed)
            self._requests[start.request_id] = request
        spans = [self._compute(step) for step in batch.steps]
        written = self._words_of(spans)
        num_tokens = len(written.pages)
        times = self._times
        pass_ns = times.base_ns + times.token_ns * num_tokens
        pass_s = pass_ns * 1e-9 * (1 + self._rng.random() * times.jitter)
        if any(step.num_tokens > 1 or not step.sample for step in batch.steps):
            await self._run_layers(batch.pass_idx, written, pass_s)
        else:
            await self._loop.sleep_ns(round(pass_s * 1e9))
            self._write(written, slice(None))
        for rank_idx in range(self._layout.tp_size):
            end = end_value(batch.pass_idx, self._layout.rank.num_layers)
            self._memory.store_progress(end, rank_idx)
        return self._output(batch, spans, pass_s)

    async def _run_layers(self, pass_idx: int, written: _Words, pass_s: float) -> None:
        num_layers = self._layout.rank.num_layers
        for layer in range(num_layers):
            await self._loop.sleep_ns(round(pass_s / num_layers * 1e9))
            self._write(written, slice(layer, layer + 1))
            for rank_idx in range(self._layout.tp_size):
                # A sibling may lag; its word tells of this layer with a later one's, then.
                if layer + 1 == num_layers or rank_idx == 0 or self._rng.random() < 0.8:
                    self._memory.store_progress(layer_value(pass_idx, layer, num_layers), rank_idx)

    def _compute(self, step: RequestStep) -> _Span:
        request = self._requests[step.request_id]
        request.pages += step.new_page_indices
        start = request.num_computed
        state = self._state_of(request.pages, start)
        values, states = [], []
        for position in range(start, start + step.num_tokens):
            value, state = self._model.advance(state, position, request.token_ids[position])
            values.append(value)
            states.append(state)
        request.num_computed = start + step.num_tokens
        return _Span(request, start, values, states, step.zero_last_page)

    def _state_of(self, pages: Sequence[int], num_tokens: int) -> int:
        """What the KV of the first positions adds up to, as it lies in the pages now."""
        if not num_tokens:
            return 0
        layout = self._layout.rank
        num_pages, in_last = layout.num_pages_for(num_tokens), num_tokens % layout.page_size
        chosen = pages[:num_pages]
        state = 0
        for memory, weights in zip(self._by_page, self._weights, strict=True):
            found = memory[chosen]
            if in_last:
                found[-1, ..., in_last:] = 0
            state += int(found.reshape(-1).dot(weights[:num_pages].reshape(-1)))
        return state & 0xFFFFFFFFFFFFFFFF

    def _words_of(self, spans: list[_Span]) -> _Words:
        page_size = self._layout.rank.page_size
        pages: list[int] = []
        offsets: list[int] = []
        values: list[int] = []
        unused: list[tuple[int, int]] = []
        for span in spans:
            stop = span.start + len(span.values)
            for position in range(span.start, stop):
                place, offset = divmod(position, page_size)
                pages.append(span.request.pages[place])
                offsets.append(offset)
            values += span.values
            if span.zero_rest and stop % page_size:
                unused.append((pages[-1], stop % page_size))
        column = np.array(values, np.uint64)[:, None, None, None]
        kv = [column * factors for factors in self._factors]
        return _Words(np.array(pages, np.intp), np.array(offsets, np.intp), kv, unused)

    def _write(self, written: _Words, layers: slice) -> None:
        for memory, kv in zip(self._by_token, written.kv, strict=True):
            memory[written.pages, written.offsets, layers] = kv[:, layers]
            for page, first in written.unused:
                memory[page, first:, layers] = 0

    def _output(self, batch: Batch, spans: list[_Span], pass_s: float) -> StepOutput:
        tokens, scores = [], []
        for step, span in zip(batch.steps, spans, strict=True):
            if step.sample:
                token_id = self._model.token(span.states[-1])
                span.request.token_ids.append(token_id)
                tokens.append(
                    SampledToken(request_id=step.request_id, token_id=token_id, logprob=0.0)
                )
            scored = self._scores(step.request_id, span)
            if scored is not None:
                scores.append(scored)
        return StepOutput(
            pass_idx=batch.pass_idx, tokens=tokens, prompt_scores=scores, pass_s=pass_s
        )

    def _scores(self, request_id: int, span: _Span) -> PromptScores | None:
        """Of the prompt's tokens that follow the span's positions, where they are asked for."""
        start = span.request.start
        if start.prompt_logprobs is None:
            return None
        known = list(start.token_ids)
        if start.next_token_id is not None:
            known.append(start.next_token_id)
        following = known[span.start + 1 : span.start + 1 + len(span.states)]
        if not following:
            return None
        scored = [
            ScoredToken(token_id=t, logprob=self._model.logprob(state, t), top=[])
            for t, state in zip(following, span.states, strict=False)
        ]
        return PromptScores(request_id=request_id, first_position=span.start + 1, tokens=scored)
