"""What is captured, and that the ranks of a group agree on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdx.checkpoint.model import ModelConfig
from pdx.config.engine import EngineConfig
from pdx.kernels.graphs import AgreedCapture, Captured, CaptureRefused, batch_sizes
from pdx.kv.geometry import kv_layout
from pdx.runner.device import RankDevice
from pdx.runner.process import graph_settings
from tests.models.test_sharding import ThreadGroup
from tests.runner.rank_process import rank_config


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (5, [1, 2, 4, 5]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_sizes_are_powers_of_two_and_the_most(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes


def test_no_more_requests_are_captured_than_hold_pages() -> None:
    assert EngineConfig(max_num_seqs=3).graph_batch == 3
    assert EngineConfig(max_num_seqs=1000).graph_batch == 128
    assert EngineConfig(cuda_graphs=False).graph_batch == 0


def test_a_rank_on_a_cpu_captures_nothing(tiny_llama: Path) -> None:
    config = rank_config(tiny_llama, graph_batch=4)
    model = ModelConfig.load(tiny_llama)
    layout = kv_layout(model, 16, 4, "float32")
    device = RankDevice(torch.device("cpu"))
    assert graph_settings(config, model, layout, device) is None


@dataclass(frozen=True)
class Output:
    """A graph that nobody replays."""

    output: Tensor

    def replay(self) -> None:
        raise AssertionError


@dataclass(kw_only=True)
class Failing:
    """A capture that runs what it is given, then refuses one of them, counted from 1."""

    at: int
    num_calls: int = 0

    def capture(self, run: Callable[[], Tensor]) -> Captured:
        self.num_calls += 1
        output = run()
        if self.num_calls == self.at:
            raise CaptureRefused("it waits")
        return Output(output)


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_all_ranks_of_a_group_capture_or_none(failing: int | None) -> None:
    """They stop at the same graph: in the next one's sums, none is left alone."""
    parts, barrier = [torch.empty(0)] * 2, threading.Barrier(2)

    def capture_three(rank: int) -> tuple[str, int]:
        group = ThreadGroup(rank, parts, barrier)
        stock = Failing(at=2 if rank == failing else 0)

        def all_agree(is_captured: bool) -> bool:
            return int(group.sum(torch.tensor([float(is_captured)]))) == 2

        capture = AgreedCapture(stock, all_agree)
        try:
            for _ in range(3):
                captured = capture.capture(lambda: group.sum(torch.ones(1)))
                assert captured.output == 2
        except CaptureRefused as refusal:
            return str(refusal), stock.num_calls
        return "", stock.num_calls

    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(capture_three, range(2)))
    if failing is None:
        assert found == [("", 3)] * 2
    else:
        assert found[failing] == ("it waits", 2)
        assert found[1 - failing] == ("another rank could not capture them", 2)
