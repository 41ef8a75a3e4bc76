"""Prompt scores: of the right rows, in blocks, and never from broken logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdx.errors import InternalError
from pdx.kernels.reference.likeliest import likeliest
from pdx.runner.prompt_scores import ScoreSpan, score_prompts


def span(request_id: int, row: int, targets: list[int], num_top: int = 0) -> ScoreSpan:
    return ScoreSpan(
        request_id=request_id,
        row=row,
        first_position=row + 1,
        target_ids=tuple(targets),
        num_top=num_top,
    )


def test_rows_of_several_requests_score_their_own_targets() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(9, 4, generator=generator), torch.randn(4, 30, generator=generator)
    spans = [span(7, 1, [5, 6, 7]), span(8, 5, [1, 2], num_top=3)]
    first, second = score_prompts(hidden, lambda rows: rows @ head, likeliest, spans, vocab_size=30)
    expected = torch.log_softmax(hidden @ head, dim=-1)
    assert (first.request_id, first.first_position) == (7, 2)
    assert [t.token_id for t in first.tokens] == [5, 6, 7]
    assert [t.logprob for t in first.tokens] == pytest.approx(
        [float(expected[1 + i, t]) for i, t in enumerate([5, 6, 7])], abs=1e-5
    )
    assert all(t.top == [] for t in first.tokens)
    for row, token in zip((5, 6), second.tokens, strict=True):
        values, ids = expected[row].topk(3)
        assert [i for i, _ in token.top] == ids.tolist()
        assert [p for _, p in token.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logits_of_a_long_prompt_are_never_held_at_once() -> None:
    """8,192 rows of 150,000 logits would be 4.6 GiB."""
    vocab_size, num_rows = 150_000, 200
    hidden = torch.arange(num_rows, dtype=torch.float32)[:, None]
    asked: list[int] = []

    def logits_of(rows: Tensor) -> Tensor:
        asked.extend(rows[:, 0].int().tolist())
        assert rows.shape[0] * vocab_size * 4 <= 32 << 20
        return torch.zeros(1, vocab_size).expand(rows.shape[0], vocab_size)

    [scores] = score_prompts(
        hidden, logits_of, likeliest, [span(1, 0, list(range(num_rows)))], vocab_size
    )
    assert asked == list(range(num_rows))
    assert [t.token_id for t in scores.tokens] == asked


def test_broken_logits_are_no_scores() -> None:
    def logits_of(rows: Tensor) -> Tensor:
        return torch.full((rows.shape[0], 9), torch.nan)

    with pytest.raises(InternalError, match="request 3"):
        score_prompts(torch.zeros(4, 2), logits_of, likeliest, [span(3, 0, [1, 2])], vocab_size=9)
