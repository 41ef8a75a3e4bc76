"""Scales of a float8 KV cache that a checkpoint brings: one for the keys of a layer, one for its
values. The rank's main thread.
"""

from __future__ import annotations

import math

from torch import nn

from pdx.errors import CheckpointError
from pdx.weights.index import WeightIndex

__all__ = ["load_kv_scales"]

_ATTRIBUTE = "kv_scales"
_LEAVES = ("k_scale", "v_scale")


def load_kv_scales(model: nn.Module, index: WeightIndex) -> frozenset[str]:
    """Give each attention that has ``kv_scales`` those of the checkpoint; 1 where it has none.

    Returns:
        The tensors that were read.

    Raises:
        CheckpointError: one is no positive number.
    """
    found: dict[str, tuple[nn.Module, int]] = {}
    for prefix, module in model.named_modules():
        if hasattr(module, _ATTRIBUTE):
            names = [f"{prefix}.{leaf}" for leaf in _LEAVES]
            found |= {n: (module, i) for i, n in enumerate(names) if n in index.tensors}
    for name, value in index.read(found):
        if value.numel() != 1 or not (math.isfinite(number := float(value)) and number > 0):
            raise CheckpointError(
                f"{name} is {value.flatten()[:3].tolist()}, not one positive number"
            )
        module, place = found[name]
        k_scale, v_scale = getattr(module, _ATTRIBUTE)
        scales = (k_scale, number) if place else (number, v_scale)
        setattr(module, _ATTRIBUTE, scales)
    return frozenset(found)
