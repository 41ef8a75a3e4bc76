"""Captured decode steps: padding, replays with other tokens, what a capture refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdx.kernels.device_batch import DeviceBatch
from pdx.kernels.linear import linear, split_counters
from pdx.kernels.ops import _triton_ops
from pdx.kernels.page_tables import PageTables
from pdx.kernels.paged_batch import PagedBatch
from pdx.kernels.paged_decode import paged_decode
from pdx.kernels.progress_word import publish
from pdx.kernels.rope_kv_append import rope_kv_append
from pdx.kernels.sampling import SamplingTensors, sample
from pdx.kernels.step_graphs import (
    CaptureRefused,
    CudaGraphs,
    GraphCapture,
    StepBuffers,
    StepGraphs,
)
from tests.kernels.triton.cases import DEVICE

VOCABULARY, HEADS, DIM, PAGE_SIZE, MAX_BATCH = 40, 2, 16, 4, 4
NAN = float("nan")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def capture() -> GraphCapture:
    if DEVICE.type == "cuda":
        return CudaGraphs()
    from tests.kernels.triton.recorder import Recorder

    return Recorder()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request of a step."""

    token_id: int
    position: int
    page_indices: Sequence[int]


def paged(rows: Sequence[Row], page_size: int = PAGE_SIZE) -> PagedBatch:
    return PagedBatch.build(page_size, [(r.position, 1, list(r.page_indices)) for r in rows])


def inputs(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Token ids and positions, on the host."""
    return torch.tensor([r.token_id for r in rows]), torch.tensor([r.position for r in rows])


def buffers() -> StepBuffers:
    return StepBuffers(max_batch=MAX_BATCH, max_pages=12, max_context_len=64, device=DEVICE)


class Layer:
    """One layer of attention, and greedy tokens of its logits."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.table = torch.randn(VOCABULARY, HEADS * DIM).to(DEVICE)
        self.qkv = torch.randn(3 * HEADS * DIM, HEADS * DIM).to(DEVICE) / 6
        self.kv = torch.full((12, HEADS, 2, PAGE_SIZE, DIM), NAN).to(DEVICE)
        self.word = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        if DEVICE.type == "cuda":
            self.word = torch.zeros(1, dtype=torch.int64).pin_memory()
        self.counters = split_counters(DEVICE)
        wide, whole = (
            torch.zeros(MAX_BATCH, dtype=t, device=DEVICE) for t in (torch.float64, torch.int64)
        )
        self.greedy = SamplingTensors(
            temperature=wide,
            top_k=whole.int(),
            top_p=wide + 1,
            min_p=wide,
            seed=whole,
            output_idx=whole,
        )

    def appended(self, ids: Tensor, positions: Tensor, pages: Tensor, offsets: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(ids, self.table)
        fused = linear(x, self.qkv, counters=self.counters, num_splits=2)
        q, k, v = fused.view(-1, 3 * HEADS, DIM).split(HEADS, dim=1)
        angles = positions[:, None] / 7.0
        angles = angles.expand(-1, DIM // 2).contiguous()
        return rope_kv_append(q, k, v, angles.cos(), angles.sin(), self.kv, pages, offsets)

    def step(self, ids: Tensor, positions: Tensor, batch: DeviceBatch, base: Tensor) -> Tensor:
        q = self.appended(ids, positions, batch.token_pages, batch.token_offsets)
        publish(self.word, base, 1)
        out = torch.zeros_like(q)
        paged_decode(q, self.kv, batch.tables.steps, 0.3, out=out)
        logits = linear(out.flatten(1), self.table, counters=self.counters)
        return sample(logits, self.greedy)

    def fresh(self, rows: list[Row]) -> list[int]:
        """The same without a graph and without padding, from tables made for these rows."""
        batch = paged(rows)
        ids, positions = (each.to(DEVICE) for each in inputs(rows))
        q = self.appended(
            ids, positions, batch.token_pages.to(DEVICE), batch.token_offsets.to(DEVICE)
        )
        out = paged_decode(q, self.kv, PageTables.of(batch.spans, DEVICE), 0.3)
        return sample(linear(out.flatten(1), self.table), self.greedy).tolist()


def graphs_of(layer: Layer, sizes: list[int], made: StepBuffers | None = None) -> StepGraphs:
    made = made or buffers()

    def step(ids: Tensor, positions: Tensor, batch: DeviceBatch) -> Tensor:
        return layer.step(ids, positions, batch, made.pass_base)

    return StepGraphs(step, made, sizes, capture())


def test_replays_give_what_steps_without_graphs_give() -> None:
    """Requests of other lengths and other pages, in batches that are padded and that are not."""
    layer, plain = Layer(), Layer()
    graphs = graphs_of(layer, [2, 4])
    assert bool(layer.kv.isnan().all()), "a capture appended something"
    tables = {0: [3, 7], 1: [5], 2: [0, 9, 2]}
    texts = {0: [4], 1: [11], 2: [8]}
    for number in range(1, 7):
        # Request 2 comes later, request 1 leaves; a page is full after 4.
        running = [0, *([1] if number < 5 else []), *([2] if number in (2, 6) else [])]
        rows = [
            Row(
                token_id=texts[request][-1],
                position=len(texts[request]) - 1,
                page_indices=tables[request][: (len(texts[request]) - 1) // PAGE_SIZE + 1],
            )
            for request in running
        ]
        tokens = graphs.run(*inputs(rows), paged(rows), pass_base=10 * number).tolist()
        if number in (1, 2, 5, 6):
            plain.kv.copy_(layer.kv)
            assert tokens == plain.fresh(rows)
        for request, token in zip(running, tokens, strict=True):
            texts[request].append(token)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        assert int(layer.word) == 10 * number + 1
    # Nothing but the requests' own places was written.
    written = {(page, slot) for page, slot in (~layer.kv.isnan()).all((1, 2, 4)).nonzero().tolist()}
    places = {
        (tables[request][place // PAGE_SIZE], place % PAGE_SIZE)
        for request, text in texts.items()
        for place in range(len(text) - 1)
    }
    assert written == places


def test_buffers_hold_steps_of_one_token_up_to_their_sizes() -> None:
    made = buffers()
    one, two = (0, 1, [3]), (0, 2, [3])
    assert made.hold(PagedBatch.build(PAGE_SIZE, [one] * MAX_BATCH))
    assert not made.hold(PagedBatch.build(PAGE_SIZE, [one] * (MAX_BATCH + 1)))
    assert not made.hold(PagedBatch.build(PAGE_SIZE, [one, two]))
    assert made.hold(PagedBatch.build(1, [(11, 1, list(range(12)))]))
    assert not made.hold(PagedBatch.build(1, [(12, 1, list(range(13)))]))
    # As those that passes without graphs bring to the device, so launches are compiled alike.
    assert all(each.data_ptr() % 16 == 0 for each in made._on_device.values())


def test_smallest_graph_that_holds_a_batch_runs() -> None:
    layer = Layer()
    graphs = graphs_of(layer, [1, 4])
    for count, size in ((1, 1), (2, 4), (4, 4)):
        rows = [Row(token_id=1, position=0, page_indices=[page]) for page in range(count)]
        assert len(graphs.run(*inputs(rows), paged(rows), 0)) == count
        assert len(graphs._graphs[size].output) == size


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU's graphs say it in their own words")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x * float(x.max()),
        lambda x: x + torch.tensor(1.0),
        lambda x: x[x > 0].sum() + x,
    ],
    ids=["a number of the device", "a value of the host", "a size of the device"],
)
def test_what_waits_or_brings_something_is_refused(spoil: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureRefused):
        StepGraphs(lambda ids, positions, batch: spoil(ids.float()), buffers(), [4], capture())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of padding, which attends to nothing
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3_moe", "tiny_deepseek"])
def test_models_steps_are_captured(model: str, request: pytest.FixtureRequest) -> None:
    """All ops of a rank's model: logits of replays are those of passes without graphs."""
    from pdx.config.model import ModelConfig
    from tests.models.comparison import empty_kv, loaded

    folder: Path = request.getfixturevalue(model)
    config = ModelConfig.load(folder)
    causal = loaded(folder, _triton_ops(), config).to(DEVICE)
    kv, other = (empty_kv(config, 8, torch.float32).to(DEVICE) for _ in range(2))
    page_size = kv.shape[4]
    made = StepBuffers(max_batch=2, max_pages=8, max_context_len=64, device=DEVICE)

    def step(ids: Tensor, positions: Tensor, batch: DeviceBatch) -> Tensor:
        return causal.logits(causal(ids, positions, kv, batch, lambda layer: None))

    graphs = StepGraphs(step, made, [2], capture())
    for position, tokens in enumerate([[5], [6, 7], [8, 9]]):
        rows = [
            Row(token_id=token, position=position - place, page_indices=[3 + place])
            for place, token in enumerate(tokens)
        ]
        batch = paged(rows, page_size)
        found = graphs.run(*inputs(rows), batch, 0)
        ids, positions = (each.to(DEVICE) for each in inputs(rows))
        hidden = causal(ids, positions, other, batch, lambda layer: None)
        torch.testing.assert_close(found, causal.logits(hidden), rtol=1e-4, atol=1e-4)
