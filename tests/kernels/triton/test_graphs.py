"""What only a GPU has: captured graphs, and a CPU that watches while they run."""

from __future__ import annotations

import time

import pytest
import torch

from pdx.kernels.progress_word import publish
from pdx.kernels.rope_kv_append import rope_kv_append
from tests.kernels.triton.cases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs are a GPU's")
LAYERS, REPLAYS = 16, 500
STEPS = LAYERS + 1


def test_word_never_runs_ahead_of_the_layer_it_tells_of() -> None:
    """A CPU that sees layer n of a replay finds that layer's K and V of that replay in memory."""
    kv = torch.zeros(LAYERS, 1, 8, 2, 64, 128, device=DEVICE)
    seen = torch.zeros(8, 2, 64, 128).pin_memory()
    word = torch.zeros(1, dtype=torch.int64).pin_memory()
    base = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    x = torch.zeros(64, 8, 128, device=DEVICE)
    one, zero = torch.ones(64, 64, device=DEVICE), torch.zeros(64, 64, device=DEVICE)
    pages, offsets = torch.zeros(64, dtype=torch.int64), torch.arange(64)
    pages, offsets = pages.to(DEVICE), offsets.to(DEVICE)

    def run_pass() -> None:
        base.add_(STEPS)
        x.add_(1.0)
        for layer in range(LAYERS):
            rope_kv_append(x[:, :0], x, x, one, zero, kv[layer], pages, offsets)
            publish(word, base, layer + 1)

    run_pass()  # compiles, which a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_pass()
    watcher = torch.cuda.Stream()
    for replay in range(2, REPLAYS + 2):
        graph.replay()
        layer = replay % LAYERS
        wait_for(word, replay * STEPS + layer + 1)
        with torch.cuda.stream(watcher):
            seen.copy_(kv[layer, 0], non_blocking=True)
        watcher.synchronize()
        assert float(seen.min()) >= replay
        torch.cuda.synchronize()
    assert int(word) == (REPLAYS + 1) * STEPS + LAYERS


def wait_for(word: torch.Tensor, value: int) -> None:
    deadline = time.monotonic() + 10
    while int(word) < value:
        assert time.monotonic() < deadline, f"the word is {int(word)}, not {value}"
