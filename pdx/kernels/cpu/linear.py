"""Linear layers on a CPU: which of torch's products reads the weights fastest.

Specification: ``kernels/reference/linear``. A decode step is bound by reading each weight once. For
bfloat16 and few rows, torch's ``linear`` gives oneDNN the weights as its second factor, which it
copies into another order on every call. Measured on one busy core with AMX, weights [1536, 576] not
in the cache: ``linear`` 307 us for 1 row and 329 us for 8; ``mv`` 213 us for 1; with the weights as
the first factor 203 us for 8. Weights ordered once, at load, were no faster (210 us), and would be
in memory twice where they are also embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["linear"]

#: Above this the copy of the weights is paid for: 1,024 rows are 1.5 times as fast with it.
_FEW_ROWS = 64


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O] in x's dtype."""
    num_rows = x.shape[0]
    if x.dtype != torch.bfloat16 or not 0 < num_rows <= _FEW_ROWS:
        return torch.nn.functional.linear(x, weight, bias)
    one = num_rows == 1
    y = torch.mv(weight, x[0])[None] if one else torch.mm(weight, x.T).T.contiguous()
    return y if bias is None else y.add_(bias)
