"""The meaning of a progress word: a uint64 that one rank stores (release order) and fabric workers
read.

A word is absolute, never incremented, so that a lost reset or a wrap cannot lie: pass ``p`` (from
1) of a model with ``L`` layers owns the values ``p * (L + 1) + k``; ``k`` layers of that pass have
their KV in memory. ``k = L + 1`` (the end of the pass) equals ``k = 0`` of the next. Values only
rise, because passes run in order. Layers are counted over the model, whatever groups they are in.
"""

from __future__ import annotations

__all__ = [
    "PROGRESS_BYTES",
    "base_value",
    "end_step",
    "end_value",
    "layer_step",
    "layer_value",
    "pass_and_layers",
]

#: Size of a rank's progress memory. Word 0 (8 bytes) is the progress word.
PROGRESS_BYTES = 4096


def layer_step(layer_idx: int) -> int:
    """The step of a pass at which layer ``layer_idx`` (from 0) has its KV in memory."""
    return layer_idx + 1


def end_step(num_layers: int) -> int:
    """The step at which the whole pass is done."""
    return num_layers + 1


def base_value(pass_idx: int, num_layers: int) -> int:
    """What the steps of a pass are added to: step k of it is this value + k."""
    return pass_idx * end_step(num_layers)


def layer_value(pass_idx: int, layer_idx: int, num_layers: int) -> int:
    """The word's value once layer ``layer_idx`` (from 0) of the pass has its KV in memory."""
    return base_value(pass_idx, num_layers) + layer_step(layer_idx)


def end_value(pass_idx: int, num_layers: int) -> int:
    """The word's value once the whole pass is done."""
    return base_value(pass_idx, num_layers) + end_step(num_layers)


def pass_and_layers(value: int, num_layers: int) -> tuple[int, int]:
    """The pass that a word's value belongs to, and how many of its layers are in memory."""
    return divmod(value, end_step(num_layers))
