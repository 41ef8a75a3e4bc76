"""The most likely tokens: equal logits have one order, wherever the cut falls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdx.kernels.cpu.likeliest import likeliest as cpu_likeliest
from pdx.kernels.ops import LikeliestOp
from pdx.kernels.reference.likeliest import likeliest


@pytest.mark.parametrize("op", [likeliest, cpu_likeliest], ids=["reference", "cpu"])
@pytest.mark.parametrize("num", [1, 2, 5, 20, 99, 100])
@pytest.mark.parametrize("levels", [1, 3, 20, 10**6])
def test_ids_are_those_of_a_stable_sort(op: LikeliestOp, num: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(levels, (7, 100), generator=generator).float() - levels / 2
    logits[3, 10:] = -torch.inf
    expected = np.argsort(-logits.numpy(), axis=-1, kind="stable")[:, :num]
    values, ids = op(logits, num)
    assert (ids.numpy() == expected).all()
    assert torch.equal(values, logits.gather(1, ids))
