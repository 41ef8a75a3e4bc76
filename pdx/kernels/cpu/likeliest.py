"""The highest logits of rows without sorting all of them.

Specification: ``kernels/reference/likeliest``. Equal logits are common, above all in bfloat16, and
torch.topk promises nothing about them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["likeliest"]


def likeliest(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """float32 [N, V], finite or -inf, and 1 to V -> logits [N, num] and ids int64 [N, num]."""
    vocab_size = logits.shape[1]
    # One more than asked for shows where equal logits stand on both sides of the cut.
    values, ids = (x.numpy() for x in torch.topk(logits, min(num + 1, vocab_size)))
    order = np.lexsort((ids, -values))
    best: npt.NDArray[np.int64] = np.take_along_axis(ids, order, axis=-1)[:, :num]
    if num < vocab_size:
        for row in np.flatnonzero(values[:, num - 1] == values[:, num]):
            best[row] = _first_of_equals(logits[int(row)], float(values[row, num]), num)
    likeliest_ids = torch.from_numpy(best)
    return logits.gather(1, likeliest_ids), likeliest_ids


def _first_of_equals(row: Tensor, lowest: float, num: int) -> npt.NDArray[np.int64]:
    candidates = (row >= lowest).nonzero().flatten()
    order = torch.argsort(row[candidates], descending=True, stable=True)
    ids: npt.NDArray[np.int64] = candidates[order[:num]].numpy()
    return ids
