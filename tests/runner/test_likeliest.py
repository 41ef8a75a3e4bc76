"""The most likely tokens: equal logits have one order, wherever the cut falls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdx.runner.likeliest import likeliest_ids, top_logprobs


@pytest.mark.parametrize("num", [1, 2, 5, 20, 99, 100])
@pytest.mark.parametrize("levels", [1, 3, 20, 10**6])
def test_ids_are_those_of_a_stable_sort(num: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(levels, (7, 100), generator=generator).float() - levels / 2
    logits[3, 10:] = -torch.inf
    expected = np.argsort(-logits.numpy(), axis=-1, kind="stable")[:, :num]
    assert (likeliest_ids(logits, num) == expected).all()


def test_log_probabilities_come_with_the_ids() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    top = top_logprobs(logits, torch.logsumexp(logits, dim=-1), 60)
    expected = torch.log_softmax(logits, dim=-1)
    for row, best in enumerate(top):
        assert len(best) == 50
        assert [p for _, p in best] == pytest.approx([float(expected[row, i]) for i, _ in best])
        assert [p for _, p in best] == sorted((p for _, p in best), reverse=True)
