"""From logits to one token a row where the logits lie on a device: all rows at once, and the host
is told once, at the end. The rank's main thread.

What is drawn stands in ``pdx.runner.sampler``, whose tokens these are. No step here needs a number
of the device on the host: sizes come from the requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdx.errors import InternalError
from pdx.kernels.ops import Ops
from pdx.request.batch import SampledToken
from pdx.runner.requests import Draw
from pdx.runner.rule_lists import RULE_COLUMNS, rule_arrays

__all__ = ["Drawn", "draw_arrays", "draw_tokens", "to_tokens"]

#: What the op takes of the draws, in its order.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "output_idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """On the device, for N draws."""

    #: int64 [N].
    token_ids: Tensor
    #: float64 [N, 2 + 2 K]: whether the logits are finite, the token's log-probability, then ids
    #: and log-probabilities of the K likeliest.
    told: Tensor


def draw_arrays(draws: Sequence[Draw], vocab_size: int) -> dict[str, Tensor]:
    """What :func:`draw_tokens` reads of the draws, by name; on the host."""
    params = [draw.sampling for draw in draws]
    arrays = {
        "draw.rows": _int64([draw.row for draw in draws]),
        "draw.temperature": _float64([p.temperature for p in params]),
        "draw.top_k": torch.tensor(
            [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params], dtype=torch.int32
        ),
        "draw.top_p": _float64([p.top_p for p in params]),
        "draw.min_p": _float64([p.min_p for p in params]),
        "draw.seed": _int64([p.seed - (p.seed >> 63 << 64) for p in params]),
        "draw.output_idx": _int64([draw.output_idx for draw in draws]),
    }
    asking = [idx for idx, draw in enumerate(draws) if draw.sampling.logprobs]
    if asking:
        arrays["tops.rows"] = _int64(asking)
    return arrays | _rule_arrays(draws)


def _rule_arrays(draws: Sequence[Draw]) -> dict[str, Tensor]:
    """Of all draws' rules; none where no draw has any."""
    if all(draw.rules is None for draw in draws):
        return {}
    rows = [(draw.rules.listed if draw.rules else None, draw.output_ids) for draw in draws]
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
        num_tops: K, how many of the likeliest tokens are told where they are asked for.
        ops: the device's.
    """
    log_sums = torch.logsumexp(logits, dim=-1)
    ruled = _ruled(logits, arrays, ops)
    drawn = ops.sample(ruled, *(arrays[f"draw.{name}"] for name in _SAMPLING))
    # Where the logits are not finite there is none; the row tells so.
    token_ids = drawn.clamp(min=0)
    chosen = logits.gather(1, token_ids[:, None])[:, 0] - log_sums
    told = torch.zeros(len(logits), 2 + 2 * num_tops, dtype=torch.float64, device=logits.device)
    told[:, 0] = torch.isfinite(log_sums)
    told[:, 1] = chosen
    if num_tops:
        rows = arrays["tops.rows"]
        # Stable: of equal logits the lower id comes first.
        values, ids = torch.sort(logits[rows], dim=-1, descending=True, stable=True)
        logprobs = values[:, :num_tops] - log_sums[rows, None]
        told[rows, 2:] = torch.cat([ids[:, :num_tops].double(), logprobs.double()], dim=-1)
    return Drawn(token_ids=token_ids, told=told)


def to_tokens(
    token_ids: Sequence[int], told: Sequence[Sequence[float]], draws: Sequence[Draw]
) -> list[SampledToken]:
    """The leader's answer.

    Raises:
        InternalError: logits are not finite; they must never become a plausible token.
    """
    broken = [draw.request_id for draw, row in zip(draws, told, strict=True) if not row[0]]
    if broken:
        raise InternalError(f"logits of requests {broken} are not finite")
    tokens = []
    for draw, token_id, row in zip(draws, token_ids, told, strict=True):
        num_tops = (len(row) - 2) // 2
        tops = list(zip(map(int, row[2 : 2 + num_tops]), row[2 + num_tops :], strict=True))
        tokens.append(
            SampledToken(
                request_id=draw.request_id,
                token_id=token_id,
                logprob=row[1],
                top=tops[: draw.sampling.logprobs or 0],
            )
        )
    return tokens


def _ruled(logits: Tensor, arrays: Mapping[str, Tensor], ops: Ops) -> Tensor:
    """``pdx.runner.logit_rules`` for all rows; the logits stay."""
    if "rules.starts" not in arrays:
        return logits
    return ops.apply_rules(logits.clone(), *(arrays[f"rules.{name}"] for name in RULE_COLUMNS))


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _float64(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
