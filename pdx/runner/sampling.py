"""From logits to one token a row: all rows at once, and the host learns of them once, at the end.
The rank's main thread.

The order of what happens to a row: the request's rules (``pdx.runner.logit_rules``), then the
highest logit where the temperature is 0; else temperature, ``top_k``, ``top_p``, ``min_p``, each on
what the one before has left, renormalised, and a draw. Log-probabilities are those of the raw
logits, before all of it.

A draw walks the kept tokens in id order, so no sort decides which token a number falls on, and a
uniform number per (seed, output index) makes it repeatable on any decoder, in any company. No step
here needs a number of the device on the host: sizes come from the requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdx.errors import InternalError
from pdx.kernels.ops import Ops
from pdx.request.batch import SampledToken
from pdx.runner.logit_rules import RULE_COLUMNS, rule_arrays
from pdx.runner.requests import Draw

__all__ = ["Drawn", "draw_arrays", "draw_tokens", "to_tokens"]

#: What the op takes of the draws, in its order.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "output_idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """On the device, for N draws."""

    #: int64 [N].
    token_ids: Tensor
    #: float64 [N, 3 + 2 K], in which ids are exact: the token, the logsumexp of its row's logits,
    #: its log-probability, then ids and log-probabilities of the K likeliest, which are 0 where a
    #: request does not ask for them.
    report: Tensor


def draw_arrays(draws: Sequence[Draw], vocab_size: int) -> dict[str, Tensor]:
    """What :func:`draw_tokens` reads of the draws, by name; on the host. Nothing of no draws."""
    if not draws:
        return {}
    params = [draw.sampling for draw in draws]
    arrays = {
        "draw.rows": _array([draw.row for draw in draws], np.int64),
        "draw.temperature": _array([p.temperature for p in params], np.float64),
        "draw.top_k": _array(
            [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params], np.int32
        ),
        "draw.top_p": _array([p.top_p for p in params], np.float64),
        "draw.min_p": _array([p.min_p for p in params], np.float64),
        "draw.seed": _array([p.seed - (p.seed >> 63 << 64) for p in params], np.int64),
        "draw.output_idx": _array([draw.output_idx for draw in draws], np.int64),
    }
    asking = [idx for idx, draw in enumerate(draws) if draw.sampling.logprobs]
    if asking:
        arrays["tops.rows"] = _array(asking, np.int64)
    return arrays | _rule_arrays(draws)


def _rule_arrays(draws: Sequence[Draw]) -> dict[str, Tensor]:
    """The rules of all draws as arrays; none where no draw has any."""
    if all(draw.rules is None for draw in draws):
        return {}
    rows = [(draw.rules, draw.output_ids) for draw in draws]
    return {f"rules.{name}": column for name, column in rule_arrays(rows).items()}


def draw_tokens(
    logits: Tensor,
    arrays: Mapping[str, Tensor],
    num_tops: int,
    ops: Ops,
) -> Drawn:
    """One token for each row.

    Args:
        logits: float32 [N, V].
        arrays: of :func:`draw_arrays`, on the device.
        num_tops: K, how many of the likeliest tokens are reported where they are asked for.
        ops: the device's.
    """
    log_sums = torch.logsumexp(logits, dim=-1)
    ruled = _ruled(logits, arrays, ops)
    drawn = ops.sample(ruled, *(arrays[f"draw.{name}"] for name in _SAMPLING))
    # Where the logits are not finite there is none, and their sum is not finite either.
    token_ids = drawn.clamp(min=0)
    chosen = logits.gather(1, token_ids[:, None])[:, 0] - log_sums
    report = torch.stack([token_ids.double(), log_sums.double(), chosen.double()], dim=1)
    if num_tops:
        rows = arrays["tops.rows"]
        values, ids = ops.likeliest(logits[rows], num_tops)
        logprobs = values - log_sums[rows, None]
        tops = report.new_zeros(len(logits), 2 * num_tops)
        tops[rows] = torch.cat([ids.double(), logprobs.double()], dim=-1)
        report = torch.cat([report, tops], dim=1)
    return Drawn(token_ids=token_ids, report=report)


def to_tokens(report: Sequence[Sequence[float]], draws: Sequence[Draw]) -> list[SampledToken]:
    """The leader's answer, from rows of :attr:`Drawn.report`.

    Raises:
        InternalError: logits are not finite; they must never become a plausible token.
    """
    broken = [
        draw.request_id
        for draw, (_, log_sum, *_) in zip(draws, report, strict=True)
        if not math.isfinite(log_sum)
    ]
    if broken:
        raise InternalError(f"logits of requests {broken} are not finite")
    tokens = []
    for draw, (token_id, _, logprob, *tops) in zip(draws, report, strict=True):
        ids, logprobs = tops[: len(tops) // 2], tops[len(tops) // 2 :]
        tokens.append(
            SampledToken(
                request_id=draw.request_id,
                token_id=int(token_id),
                logprob=logprob,
                top=list(zip(map(int, ids), logprobs, strict=True))[: draw.sampling.logprobs or 0],
            )
        )
    return tokens


def _ruled(logits: Tensor, arrays: Mapping[str, Tensor], ops: Ops) -> Tensor:
    """``pdx.runner.logit_rules`` for all rows; the logits stay."""
    if "rules.starts" not in arrays:
        return logits
    return ops.apply_rules(logits.clone(), *(arrays[f"rules.{name}"] for name in RULE_COLUMNS))


def _array(values: Sequence[float], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype))
