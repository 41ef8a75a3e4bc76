"""The ranks of a simulated node: their memory, and passes that take time and compute what the
simulated model computes, from the KV that they find in their pages.

Runs on the virtual loop, in the node's process.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdx.errors import WorkerError
from pdx.fabric import MemoryPart
from pdx.kv.layout import NodeLayout
from pdx.kv.progress import end_value, layer_value
from pdx.lab.sim.loop import VirtualLoop
from pdx.lab.sim.model import SimulatedModel
from pdx.lab.simulated_fabric import AddressSpace
from pdx.request.batch import (
    Batch,
    PromptScores,
    RequestStart,
    RequestStep,
    SampledToken,
    ScoredToken,
    StepOutput,
)

__all__ = ["PassTimes", "SimulatedMemory", "SimulatedRanks"]

_WORD_BYTES = 8
_NO_PLACES = np.zeros(0, np.int64)


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
        #: All ranks' KV.
        self.words = np.zeros(layout.total_bytes // _WORD_BYTES, np.uint64)
        self._kv_bytes = layout.total_bytes
        self._kv_address = space.map(self.words)
        self._progress_address = space.map(bytearray(_WORD_BYTES * layout.tp_size))
        self.progress_addresses = tuple(
            self._progress_address + _WORD_BYTES * i for i in range(layout.tp_size)
        )
        #: Words are watched in a simulated room.
        self.progress_eventfds: tuple[int, ...] = ()
        self.page_words = rank.page_bytes // _WORD_BYTES
        #: Where a page's words lie from its first one in rank 0's layer 0: [S, rank, L, Hkv, part].
        self.places_in_page = (
            np.arange(rank.page_size)[:, None, None, None, None]
            + _steps(layout.tp_size, layout.rank_stride_bytes // _WORD_BYTES, 3)
            + _steps(rank.num_layers, rank.layer_stride_bytes // _WORD_BYTES, 2)
            + _steps(rank.num_kv_heads, rank.num_parts * rank.page_size, 1)
            + _steps(rank.num_parts, rank.page_size, 0)
        )

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


def _steps(count: int, stride: int, num_inner: int) -> NDArray[np.int64]:
    return np.arange(count).reshape(-1, *[1] * num_inner) * stride


@dataclass(slots=True)
class _Request:
    start: RequestStart
    token_ids: list[int]
    num_computed: int
    #: Where the words of the tokens in its pages lie in the ranks' memory: [T * W].
    places: NDArray[np.int64]


class _Span(NamedTuple):
    """What a pass does for one request: positions from ``start``, and the states after each."""

    request: _Request
    start: int
    values: list[int]
    states: list[int]
    zero_rest: bool


class _Words(NamedTuple):
    """What a pass writes."""

    #: Where, and what, of each token: [T, rank, L, Hkv * part].
    places: NDArray[np.int64]
    kv: NDArray[np.uint64]
    #: What is zeroed behind it: [tokens, rank, L, Hkv * part].
    unused: list[NDArray[np.int64]]


def _head_shares(heads: list[range]) -> list[NDArray[np.uint64]]:
    """How many times what each rank holds of each of its heads counts in the state, modulo 2^64.

    Once all together; but that a replica differs must not go unseen, so the difference between it
    and the head's first holder counts, too.
    """
    replicas: dict[int, list[int]] = {}
    for rank_idx, own in enumerate(heads):
        for head in own:
            replicas.setdefault(head, []).append(rank_idx)
    factors = [2 * rank_idx + 1 for rank_idx in range(len(heads))]
    shares = [
        [
            factors[rank_idx]
            if replicas[head][0] != rank_idx
            else 1 - sum(factors[other] for other in replicas[head][1:])
            for head in own
        ]
        for rank_idx, own in enumerate(heads)
    ]
    return [np.array(own, np.int64).astype(np.uint64) for own in shares]


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
        heads = [layout.heads(rank_idx) for rank_idx in range(layout.tp_size)]
        #: What a token's value is multiplied by to give its words: [rank, L, Hkv * part].
        self._factors = np.stack([model.factors[:, own.start : own.stop] for own in heads])
        self._factors = self._factors.reshape(layout.tp_size, layout.rank.num_layers, -1)
        weights = np.stack(
            [
                model.place_weights[:, own.start : own.stop] * shares[:, None]
                for own, shares in zip(heads, _head_shares(heads), strict=True)
            ]
        ).reshape(-1)
        self._num_words = len(weights)
        #: How much each word of a request's tokens counts in the state: [T * W].
        self._weights = (model.position_weights[:, None] * weights).reshape(-1)

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
            request = _Request(start, list(start.token_ids), start.num_computed, _NO_PLACES)
            self._requests[start.request_id] = request
        spans = [self._compute(step) for step in batch.steps]
        written = self._words_of(spans)
        num_tokens = len(written.places)
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
        if step.new_page_indices:
            pages = np.array(step.new_page_indices)[:, None] * self._memory.page_words
            new = (pages + self._memory.places_in_page.reshape(-1)).reshape(-1)
            request.places = np.concatenate((request.places, new)) if len(request.places) else new
        start = request.num_computed
        state = self._state_of(request, start)
        values, states = [], []
        for position in range(start, start + step.num_tokens):
            value, state = self._model.advance(state, position, request.token_ids[position])
            values.append(value)
            states.append(state)
        request.num_computed = start + step.num_tokens
        return _Span(request, start, values, states, step.zero_last_page)

    def _state_of(self, request: _Request, num_tokens: int) -> int:
        """What the KV of the first positions adds up to, as it lies in the pages now."""
        stop = num_tokens * self._num_words
        found = self._memory.words.take(request.places[:stop])
        return int(found.dot(self._weights[:stop]))

    def _words_of(self, spans: list[_Span]) -> _Words:
        page_size, num_words = self._layout.rank.page_size, self._num_words
        places: list[NDArray[np.int64]] = []
        values: list[int] = []
        unused: list[NDArray[np.int64]] = []
        for span in spans:
            stop = span.start + len(span.values)
            places.append(span.request.places[span.start * num_words : stop * num_words])
            values += span.values
            if span.zero_rest and stop % page_size:
                end = stop - stop % page_size + page_size
                rest = span.request.places[stop * num_words : end * num_words]
                unused.append(rest.reshape(-1, *self._factors.shape))
        chosen = places[0] if len(places) == 1 else np.concatenate((_NO_PLACES, *places))
        kv = np.array(values, np.uint64)[:, None, None, None] * self._factors
        assert len(chosen) == kv.size, "a pass computes tokens that have no page"
        return _Words(chosen.reshape(-1, *self._factors.shape), kv, unused)

    def _write(self, written: _Words, layers: slice) -> None:
        words = self._memory.words
        words[written.places[:, :, layers]] = written.kv[:, :, layers]
        for places in written.unused:
            words[places[:, :, layers]] = 0

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
        """Logprobs of the prompt's tokens that follow the span's positions, where asked for."""
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
