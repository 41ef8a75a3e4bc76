"""Draft verification: what stands, and that a text with drafts is the text without them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdx.kernels.reference.verify_drafts import count_standing
from pdx.kernels.sampling import sample
from pdx.kernels.verify_drafts import verify_drafts
from tests.kernels.triton.cases import DEVICE

#: Requests of one pass: tokens drawn, drafts fed.
REQUESTS = [
    ([5], []),
    ([5, 6], [5]),
    ([5, 6], [4]),
    ([1, 2, 3, 4], [1, 2, 3]),
    ([1, 2, 3, 4], [1, 9, 3]),
    ([-1, 2, 3], [1, 2]),
    ([1, -1, 3], [1, 2]),
]


def standing(requests: list[tuple[list[int], list[int]]], max_drafts: int) -> list[int]:
    tokens = [token for drawn, _ in requests for token in drawn]
    # Behind a request's last row nothing is fed: a value that would stand if it were read.
    drafts = [draft for drawn, fed in requests for draft in (*fed, drawn[-1])]
    lengths = torch.tensor([0] + [len(drawn) for drawn, _ in requests])
    return verify_drafts(
        torch.tensor(tokens, dtype=torch.int64, device=DEVICE),
        torch.tensor(drafts, dtype=torch.int64, device=DEVICE),
        lengths.cumsum(0)[:-1].to(DEVICE, torch.int32),
        torch.tensor([len(fed) for _, fed in requests], dtype=torch.int32, device=DEVICE),
        max_drafts,
    ).tolist()


@pytest.mark.parametrize("max_drafts", [3, 8])
def test_tokens_up_to_the_first_wrong_draft_stand(max_drafts: int) -> None:
    assert standing(REQUESTS, max_drafts) == [count_standing(*request) for request in REQUESTS]
    assert standing(REQUESTS, max_drafts) == [1, 2, 1, 4, 2, 1, 2]


def test_no_requests() -> None:
    assert standing([], 3) == []


def test_padding_of_a_graph_has_no_tokens() -> None:
    tokens = torch.tensor([3, 4], device=DEVICE)
    rows = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    num_drafts = torch.tensor([1, -1], dtype=torch.int32, device=DEVICE)
    assert verify_drafts(tokens, tokens, rows, num_drafts, 4).tolist() == [2, 0]


def draw(logits: Tensor, first_idx: int) -> list[int]:
    count = len(logits)
    wide = torch.ones(count, dtype=torch.float64, device=DEVICE)
    sampling = {
        "temperature": wide * 0.8,
        "top_k": torch.zeros(count, dtype=torch.int32, device=DEVICE),
        "top_p": wide,
        "min_p": wide * 0,
        "seed": torch.full((count,), 11, device=DEVICE),
        "output_idx": torch.arange(first_idx, first_idx + count, device=DEVICE),
    }
    return sample(logits.to(DEVICE), **sampling).tolist()


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_text_is_the_one_without_drafts(num_drafts: int) -> None:
    """A model whose logits depend on the last token alone, and drafts that are right half the
    time."""
    model = torch.randn(6, 6) * 2
    text = [0]
    while len(text) < 13:
        text += draw(model[text[-1:]], len(text))
    drafted, num_passes = [0], 0
    while len(drafted) < 13:
        place = len(drafted)
        drafts = [*text[place:], *[0] * num_drafts][:num_drafts]
        drafts[num_passes % num_drafts] = (drafts[num_passes % num_drafts] + num_passes) % 6
        tokens = draw(model[[drafted[-1], *drafts]], place)
        drafted += tokens[: standing([(tokens, drafts)], num_drafts)[0]]
        num_passes += 1
    assert drafted[:13] == text
    assert num_passes < 12
