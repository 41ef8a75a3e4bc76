"""The most likely tokens of rows of logits, the same ones every time. The rank's main thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["likeliest_ids", "top_logprobs"]


def likeliest_ids(logits: Tensor, num: int) -> npt.NDArray[np.int64]:
    """Ids of the ``num`` highest logits, highest first; of equal ones the lower id comes first.

    Equal logits are common, above all in bfloat16, and torch.topk promises nothing about them.

    Args:
        logits: float32 [N, V], finite or -inf.
        num: 1 to V.

    Returns:
        [N, num].
    """
    vocab_size = logits.shape[1]
    # One more than asked for shows where equal logits stand on both sides of the cut.
    values, ids = (x.cpu().numpy() for x in torch.topk(logits, min(num + 1, vocab_size)))
    order = np.lexsort((ids, -values))
    best: npt.NDArray[np.int64] = np.take_along_axis(ids, order, axis=-1)[:, :num]
    if num < vocab_size:
        for row in np.flatnonzero(values[:, num - 1] == values[:, num]):
            best[row] = _first_of_equals(logits[int(row)], float(values[row, num]), num)
    return best


def top_logprobs(logits: Tensor, log_sums: Tensor, num: int) -> list[list[tuple[int, float]]]:
    """(id, log-probability) of the ``num`` most likely tokens of each row, most likely first.

    Args:
        logits: float32 [N, V].
        log_sums: float32 [N], log of the sum of the exponentials of each row.
        num: 1 or more; more than V gives V.
    """
    ids = likeliest_ids(logits, min(num, logits.shape[1]))
    logprobs = logits.gather(1, torch.from_numpy(ids).to(logits.device)) - log_sums[:, None]
    rows: Any = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return [list(zip(row_ids, row_logprobs, strict=True)) for row_ids, row_logprobs in rows]


def _first_of_equals(row: Tensor, lowest: float, num: int) -> npt.NDArray[np.int64]:
    candidates = (row >= lowest).nonzero().flatten()
    order = torch.argsort(row[candidates], descending=True, stable=True)
    ids: npt.NDArray[np.int64] = candidates[order[:num]].cpu().numpy()
    return ids
