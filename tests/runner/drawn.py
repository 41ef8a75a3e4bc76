"""Tokens drawn from logits the way a rank draws them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdx.kernels.ops import Ops, ops_for
from pdx.request.batch import SampledToken
from pdx.runner.requests import Draw
from pdx.runner.sampling import draw_arrays, draw_tokens, to_tokens

__all__ = ["drawn"]


def drawn(
    logits: torch.Tensor, draws: Sequence[Draw], ops: Ops | None = None
) -> list[SampledToken]:
    """logits float32 [N, V], which stay; by a CPU's ops where none are given."""
    vocab_size = logits.shape[1]
    before = logits.clone()
    num_tops = min(max(d.sampling.logprobs or 0 for d in draws), vocab_size)
    found = draw_tokens(logits, draw_arrays(draws, vocab_size), num_tops, ops or ops_for("cpu"))
    assert torch.equal(logits, before) or logits.isnan().any(), "the raw logits are still needed"
    return to_tokens(found.report.tolist(), draws)
