"""The device of a rank: which GPU it gets, why it gets none, what is copied at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdx.errors import ConfigError
from pdx.runner.device import RankDevice, check_room, choose_gpu, open_device
from tests.runner.kernel_runner import staged_cpu
from tests.runner.rank_process import rank_config


@pytest.mark.parametrize(
    ("name", "rank", "expected"), [("cuda", 0, 0), ("cuda", 3, 3), ("cuda:4", 1, 5)]
)
def test_each_rank_has_the_next_gpu(name: str, rank: int, expected: int) -> None:
    assert choose_gpu(name, rank, 4, 8) == expected


def test_too_few_gpus_are_refused_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    message = r"--device cuda with --tp 4 needs GPUs 0 to 3, but 2 GPUs are visible "
    for rank in range(4):  # all of them refuse, so that none waits for the others
        with pytest.raises(ConfigError, match=message + r"\(CUDA_VISIBLE_DEVICES=2,3\)"):
            choose_gpu("cuda", rank, 4, 2)


def test_no_gpu_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        ConfigError, match=r"no GPU is visible \(CUDA_VISIBLE_DEVICES=\)"
    ) as refused:
        choose_gpu("cuda:1", 0, 1, 0)
    assert "nvidia-smi" in (refused.value.hint or "")


def test_memory_that_does_not_fit_is_refused_with_the_numbers() -> None:
    gib = 1 << 30
    check_room("cuda:0", "KV memory", 30 * gib, 30 * gib, 80 * gib)
    with pytest.raises(ConfigError, match=r"KV memory of 31\.0 GiB do not fit on cuda:0: 30\.0 of"):
        check_room("cuda:0", "KV memory", 31 * gib, 30 * gib, 80 * gib)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
def test_pytorch_without_cuda_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is built without CUDA"):
        open_device(rank_config(tmp_path, device="cuda"))


def test_arrays_arrive_as_they_were_and_at_the_same_place() -> None:
    device = staged_cpu()
    places = []
    for size in (3, 5):
        arrays = {
            "a": torch.arange(size),
            "b": torch.tensor([[0.5, 1.5]], dtype=torch.float64),
            "c": torch.arange(size, dtype=torch.int32),
            "none": torch.empty(0, dtype=torch.int64),
        }
        arrived = device.upload(arrays)
        for name, array in arrays.items():
            assert torch.equal(arrived[name], array)
            assert arrived[name].data_ptr() % 16 == 0 or not array.numel()
            assert arrived[name].data_ptr() != array.data_ptr() or not array.numel()
        places.append(arrived["a"].data_ptr())
        copied = device.download(arrived["b"])
        assert torch.equal(copied, arrays["b"])
    assert places[0] == places[1], "a captured graph reads what came last"


def test_a_cpus_own_ops_read_the_hosts_arrays() -> None:
    array = torch.arange(3)
    assert RankDevice(torch.device("cpu")).upload({"a": array})["a"] is array
