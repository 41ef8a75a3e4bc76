"""Decode steps captured as CUDA graphs. Run with `-m gpu` on a machine that has a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3_moe", "tiny_deepseek"])
def test_captured_steps_change_nothing(model: str, request: pytest.FixtureRequest) -> None:
    """Joins, leaves, padding and a preemption, as in tests/runner/test_captured.py."""
    from pdx.kernels.graphs import CudaGraphs
    from pdx.runner.device import RankDevice
    from tests.runner.captured import (
        NUM_PAGES,
        SCRIPTS,
        Replays,
        captured_runner,
        check_outputs,
        run_all,
    )
    from tests.runner.kernel_runner import kernel_runner

    folder: Path = request.getfixturevalue(model)
    passes, sizes = SCRIPTS["long"]
    gpu = torch.device("cuda", 0)
    plain = kernel_runner(folder, RankDevice(gpu), num_pages=NUM_PAGES)
    replays = Replays(stock=CudaGraphs())
    wanted = run_all(plain, passes, replays, sizes, [])
    rank = captured_runner(folder, RankDevice(gpu), replays, sizes)
    assert rank.runner.graphs is not None
    found = run_all(rank, passes, replays, sizes, [])
    assert found.replayed == found.expected
    check_outputs(found.outputs, wanted.outputs, tolerance=1e-4)
    torch.testing.assert_close(rank.kv, plain.kv, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_what_waits_is_refused_and_the_rank_goes_on(tiny_llama: Path) -> None:
    from pdx.kernels.graphs import CudaGraphs
    from pdx.runner.device import RankDevice
    from tests.runner.captured import without_graphs

    device = RankDevice(torch.device("cuda", 0))
    told = without_graphs(tiny_llama, "waits", device, CudaGraphs())
    assert told["is_none"] and told["num_tokens"] == 1
    assert told["word"] == 0 and told["kv_is_untouched"]
    assert len(told["log"]) == 1
