"""What a request changes in its logits before a token is drawn. Made when the request starts.

In this order, on float32 logits: ``logit_bias`` is added; the repetition penalty divides positive
and multiplies negative logits of tokens in prompt or output; the presence penalty is taken from
tokens in the output once, and the frequency penalty for each time they are in it; the stop tokens
cannot be drawn before ``min_tokens``. Greedy requests obey all of it. Temperature and filters come
afterwards (``pdx.runner.sampler``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pdx.request.request import SamplingParams
from pdx.runner.rule_lists import RuleList

__all__ = ["LogitRules"]

_FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True, kw_only=True)
class LogitRules:
    """One request's rules; immutable, so that a step may be repeated."""

    sampling: SamplingParams
    #: int64 ids without repeats, and what is added to their logits, float32.
    bias_ids: Tensor
    bias: Tensor
    #: int64, without repeats; empty where the repetition penalty changes nothing.
    prompt_ids: Tensor
    #: int64 ids that ``min_tokens`` holds back.
    stop_ids: Tensor

    @cached_property
    def listed(self) -> RuleList:
        """The same for a device; ranks that draw on the host never ask."""
        return RuleList.of(self.sampling, self.bias_ids, self.bias, self.prompt_ids, self.stop_ids)

    @classmethod
    def of(
        cls, sampling: SamplingParams, prompt_ids: Sequence[int], vocab_size: int
    ) -> LogitRules | None:
        """The rules of a request; None: its logits stay as they are.

        Ids past the vocabulary are left out: no row of logits has them, so nothing would change.
        """
        penalised = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        )
        held_back = sampling.stop_token_ids if sampling.min_tokens > 0 else ()
        if not penalised and not sampling.logit_bias and not held_back:
            return None
        bias_ids = _ids(sampling.logit_bias, vocab_size)
        bias = torch.tensor([sampling.logit_bias[i] for i in bias_ids.tolist()])
        repeats = sampling.repetition_penalty != 1
        seen = _ids(set(prompt_ids) if repeats else (), vocab_size)
        stop_ids = _ids(held_back, vocab_size)
        return cls(
            sampling=sampling,
            bias_ids=bias_ids,
            bias=bias,
            prompt_ids=seen,
            stop_ids=stop_ids,
        )

    def apply(self, row: Tensor, output_ids: Sequence[int]) -> Tensor:
        """Logits [V] float32 of the token that follows ``output_ids`` -> a changed copy."""
        row = row.clone()
        row[self.bias_ids] += self.bias
        self._penalise(row, torch.tensor(output_ids, dtype=torch.int64))
        if len(output_ids) < self.sampling.min_tokens:
            row[self.stop_ids] = float("-inf")
        return row

    def _penalise(self, row: Tensor, output: Tensor) -> None:
        repetition = self.sampling.repetition_penalty
        if repetition != 1:
            # An id may be here more than once; then the same value is stored twice.
            seen = torch.cat([self.prompt_ids, output])
            # A penalty close to zero must not make an infinite logit: nothing can be drawn by it.
            scores = row[seen].to(torch.float64)
            scores = torch.where(scores > 0, scores / repetition, scores * repetition)
            row[seen] = scores.clamp(_FLOAT32.min, _FLOAT32.max).to(torch.float32)
        presence, frequency = self.sampling.presence_penalty, self.sampling.frequency_penalty
        if presence != 0 or frequency != 0:
            ids, counts = torch.unique(output, return_counts=True)
            row[ids] -= presence + frequency * counts.to(torch.float32)


def _ids(ids: Iterable[int], vocab_size: int) -> Tensor:
    return torch.tensor([i for i in ids if 0 <= i < vocab_size], dtype=torch.int64)
