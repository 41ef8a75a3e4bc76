"""The progress word: absolute values that a replay of the same launch moves on."""

from __future__ import annotations

import torch

from pdx.kernels.progress_word import publish
from pdx.kv.progress import layer_value
from tests.kernels.triton.cases import DEVICE


def test_value_comes_from_the_pass_and_the_step() -> None:
    word = torch.tensor([7], device=DEVICE)
    base = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for pass_idx in (1, 2, 2**40):
        base.fill_(pass_idx * (3 + 1))
        for layer_idx in range(3):
            publish(word, base, layer_idx + 1)
            assert int(word) == layer_value(pass_idx, layer_idx, 3)


def test_words_beside_it_stay() -> None:
    words = torch.full((3,), -1, dtype=torch.int64, device=DEVICE)
    publish(words[1:2], torch.tensor([10], device=DEVICE), 16)
    assert words.tolist() == [-1, 26, -1]
