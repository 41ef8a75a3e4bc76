"""Captured decode steps: padding, replays with other tokens, what a capture refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch
from pdx.kernels.graphs import (
    CaptureRefused,
    CudaGraphs,
    DecodeGraphs,
    GraphCapture,
    GraphSettings,
)
from pdx.kernels.linear import linear, split_counters
from pdx.kernels.ops import _triton_ops
from pdx.kernels.paged_decode import paged_decode
from pdx.kernels.progress_word import publish
from pdx.kernels.rope_kv_append import rope_kv_append
from pdx.kernels.sampling import sample
from pdx.kernels.staging import Staging
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


def paged(rows: Sequence[Row], page_size: int = PAGE_SIZE, pass_base: int = 0) -> ForwardBatch:
    """On the host."""
    batch = ForwardBatch.build(
        page_size,
        [(r.position, 1, list(r.page_indices)) for r in rows],
        token_ids=[r.token_id for r in rows],
    )
    return replace(batch, progress_base=torch.tensor([pass_base]))


def captured(
    step: Callable[[ForwardBatch], Tensor],
    sizes: Sequence[int],
    page_size: int = PAGE_SIZE,
    num_pages: int = 3,
) -> DecodeGraphs:
    """``num_pages`` for each request of the largest size."""
    settings = GraphSettings(capture=capture(), sizes=sizes, max_seq_len=64)
    return DecodeGraphs(step, settings, page_size=page_size, num_pages=num_pages, device=DEVICE)


def run(graphs: DecodeGraphs, batch: ForwardBatch) -> Tensor:
    graphs.place(batch)
    return graphs.replay(len(batch))


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
        self.greedy = {
            "temperature": wide,
            "top_k": whole.int(),
            "top_p": wide + 1,
            "min_p": wide,
            "seed": whole,
            "output_idx": whole,
        }

    def appended(self, batch: ForwardBatch) -> Tensor:
        x = torch.nn.functional.embedding(batch.token_ids, self.table)
        fused = linear(x, self.qkv, counters=self.counters, num_splits=2)
        q, k, v = fused.view(-1, 3 * HEADS, DIM).split(HEADS, dim=1)
        angles = batch.positions[:, None] / 7.0
        angles = angles.expand(-1, DIM // 2).contiguous()
        places = batch.token_pages, batch.token_offsets
        return rope_kv_append(q, k, v, angles.cos(), angles.sin(), self.kv, *places)

    def step(self, batch: ForwardBatch) -> Tensor:
        q = self.appended(batch)
        publish(self.word, batch.progress_base, 1)
        out = torch.zeros_like(q)
        paged_decode(q, self.kv, batch.decodes, 0.3, out=out)
        logits = linear(out.flatten(1), self.table, counters=self.counters)
        return sample(logits, **self.greedy)

    def fresh(self, rows: list[Row]) -> list[int]:
        """The same without a graph and without padding, from tables made for these rows."""
        batch, _ = paged(rows).on(Staging(DEVICE))
        out = paged_decode(self.appended(batch), self.kv, batch.decodes, 0.3)
        return sample(linear(out.flatten(1), self.table), **self.greedy).tolist()


def test_replays_give_what_steps_without_graphs_give() -> None:
    """Requests of other lengths and other pages, in batches that are padded and that are not."""
    layer, plain = Layer(), Layer()
    graphs = captured(layer.step, [2, MAX_BATCH])
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
        tokens = run(graphs, paged(rows, pass_base=10 * number)).tolist()
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


def test_graphs_hold_steps_of_one_token_up_to_their_sizes() -> None:
    def step(batch: ForwardBatch) -> Tensor:
        arrays = (batch.token_ids, batch.token_pages, batch.decodes.seq_lens)
        # As those that passes without graphs bring to the device, so launches are compiled alike.
        assert all(each.data_ptr() % 16 == 0 for each in arrays)
        return batch.positions + 1

    graphs = captured(step, [MAX_BATCH])
    one, two = (0, 1, [3]), (0, 2, [3])
    assert graphs.hold(ForwardBatch.build(PAGE_SIZE, [one] * MAX_BATCH))
    assert not graphs.hold(ForwardBatch.build(PAGE_SIZE, [one] * (MAX_BATCH + 1)))
    assert not graphs.hold(ForwardBatch.build(PAGE_SIZE, [one, two]))
    assert not graphs.hold(ForwardBatch.build(PAGE_SIZE, [two], decode_rows=2))
    assert not graphs.hold(ForwardBatch.build(PAGE_SIZE, []))
    assert graphs.hold(ForwardBatch.build(1, [(11, 1, list(range(12)))]))
    assert not graphs.hold(ForwardBatch.build(1, [(12, 1, list(range(13)))]))
    # The largest that they hold, at the addresses of the capture.
    assert run(graphs, ForwardBatch.build(1, [(2, 1, [5, 6, 7])] * MAX_BATCH)).tolist() == [3] * 4


def test_smallest_graph_that_holds_a_batch_runs() -> None:
    layer = Layer()
    graphs = captured(layer.step, [1, MAX_BATCH])
    for count, size in ((1, 1), (2, 4), (4, 4)):
        rows = [Row(token_id=1, position=0, page_indices=[page]) for page in range(count)]
        assert len(run(graphs, paged(rows))) == count
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
        captured(lambda batch: spoil(batch.token_ids.float()), [4])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of padding, which attends to nothing
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3_moe", "tiny_deepseek"])
def test_models_steps_are_captured(model: str, request: pytest.FixtureRequest) -> None:
    """All ops of a rank's model: logits of replays are those of passes without graphs."""
    from pdx.checkpoint.model import ModelConfig
    from tests.models.comparison import empty_kv, loaded

    folder: Path = request.getfixturevalue(model)
    config = ModelConfig.load(folder)
    causal = loaded(folder, _triton_ops(), config).to(DEVICE)
    kv, other = (empty_kv(config, 8, torch.float32).to(DEVICE) for _ in range(2))
    page_size = kv.shape[4]

    def step(batch: ForwardBatch, memory: Tensor = kv) -> Tensor:
        tokens = batch.token_ids, batch.positions
        return causal.logits(causal(*tokens, memory, batch, lambda layer: None))

    graphs = captured(step, [2], page_size, num_pages=8)
    for position, tokens in enumerate([[5], [6, 7], [8, 9]]):
        rows = [
            Row(token_id=token, position=position - place, page_indices=[3 + place])
            for place, token in enumerate(tokens)
        ]
        batch = paged(rows, page_size)
        found = run(graphs, batch)
        plain = step(batch.on(Staging(DEVICE))[0], other)
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
