"""From logits to one token a row where the logits lie on a device: all rows at once, and the host
is told once, at the end. The rank's main thread.

What is drawn stands in ``pdx.runner.sampler``, whose tokens these are. No step here needs a number
of the device on the host: sizes come from the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdx.errors import InternalError
from pdx.request.batch import SampledToken
from pdx.runner.requests import Draw

__all__ = ["Drawn", "draw_arrays", "draw_tokens", "to_tokens"]

_FLOAT32 = torch.finfo(torch.float32)
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
    """Of all draws' rules: row, id and value of each logit that they change."""
    found: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
    for idx, draw in enumerate(draws):
        rules = draw.rules
        if rules is None:
            continue
        sampling, output = draw.sampling, torch.tensor(draw.output_ids, dtype=torch.int64)
        if len(rules.bias_ids):
            found.setdefault("bias", []).append((idx, rules.bias_ids, rules.bias))
        if sampling.repetition_penalty != 1:
            seen = torch.cat([rules.prompt_ids, output])
            penalty = torch.full((len(seen),), sampling.repetition_penalty, dtype=torch.float64)
            found.setdefault("seen", []).append((idx, seen, penalty))
        if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
            ids, counts = torch.unique(output, return_counts=True)
            cost = sampling.presence_penalty + sampling.frequency_penalty * counts.float()
            found.setdefault("used", []).append((idx, ids, cost))
        if len(draw.output_ids) < sampling.min_tokens:
            held = torch.full((len(rules.stop_ids),), float("-inf"))
            found.setdefault("held", []).append((idx, rules.stop_ids, held))
    return {
        f"{name}.{column}": values
        for name, parts in found.items()
        for column, values in (
            ("rows", torch.cat([torch.full((len(ids),), idx) for idx, ids, _ in parts])),
            ("ids", torch.cat([ids for _, ids, _ in parts])),
            ("values", torch.cat([values for _, _, values in parts])),
        )
    }


def draw_tokens(
    logits: Tensor,
    arrays: Mapping[str, Tensor],
    num_tops: int,
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Drawn:
    """One token for each row.

    Args:
        logits: float32 [N, V].
        arrays: of :func:`draw_arrays`, on the device.
        num_tops: K, how many of the likeliest tokens are told where they are asked for.
        sample: the op.
    """
    log_sums = torch.logsumexp(logits, dim=-1)
    drawn = sample(_ruled(logits, arrays), *(arrays[f"draw.{name}"] for name in _SAMPLING))
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


def _ruled(logits: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
    """``pdx.runner.logit_rules``, in its order, for all rows."""
    if not any(f"{name}.rows" in arrays for name in ("bias", "seen", "used", "held")):
        return logits
    ruled = logits.clone()

    def of(name: str) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
        if f"{name}.rows" not in arrays:
            return None
        return (arrays[f"{name}.rows"], arrays[f"{name}.ids"]), arrays[f"{name}.values"]

    if bias := of("bias"):
        ruled.index_put_(*bias, accumulate=True)
    if seen := of("seen"):
        places, penalty = seen
        scores = ruled[places].to(torch.float64)
        scores = torch.where(scores > 0, scores / penalty, scores * penalty)
        ruled.index_put_(places, scores.clamp(_FLOAT32.min, _FLOAT32.max).to(torch.float32))
    if used := of("used"):
        places, cost = used
        ruled.index_put_(places, -cost, accumulate=True)
    if held := of("held"):
        ruled.index_put_(*held)
    return ruled


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _float64(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
