"""Which weights stay in float8 as they are stored, and the scales that go with them. The rank's
main thread.

Kernels find the scale of a value by its place, so a parameter must be made of whole blocks: what a
rank takes of a stored tensor begins and ends where blocks do, and so does the place that it fills.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from pdx.checkpoint.quantization import SCALE_SUFFIX, Float8Blocks
from pdx.errors import ConfigError
from pdx.kernels.reference.linear_float8 import BLOCK_SIZE
from pdx.models.stored import Index, StoredPart
from pdx.weights.index import WeightIndex

__all__ = ["kept_scales"]


def kept_scales(
    model: nn.Module,
    parts: Mapping[str, tuple[StoredPart, ...]],
    index: WeightIndex,
    blocks: Float8Blocks,
) -> dict[str, tuple[StoredPart, ...]]:
    """What fills each scale parameter that the model shall have, by its name; the parameter of
    the same name without ``SCALE_SUFFIX`` stays in float8.

    Args:
        parts: of the model's parameters.

    Raises:
        ConfigError: blocks are of a size that kernels do not read, or a rank's part cuts one.
    """
    kept: dict[str, tuple[StoredPart, ...]] = {}
    for prefix, module in model.named_modules():
        names = [f"{prefix}.{leaf}" for leaf in getattr(module, "float8", ())]
        own = [part for name in names for part in parts[name]]
        stored = [index.tensors.get(part.name) for part in own]
        if not own or not all(tensor is not None and tensor.is_float8 for tensor in stored):
            continue
        if (blocks.num_rows, blocks.num_columns) != (BLOCK_SIZE, BLOCK_SIZE):
            raise ConfigError(
                f"weights are stored in float8 blocks of {blocks.num_rows} x {blocks.num_columns}, "
                f"and kernels read blocks of {BLOCK_SIZE} x {BLOCK_SIZE}",
                hint="use --device cpu, which dequantises the weights",
            )
        found = {name: [_of_scales(part, blocks) for part in parts[name]] for name in names}
        # Where a place begins within a block (a small expert's second half), all are dequantised.
        if all(part is not None for each in found.values() for part in each):
            for name, each in found.items():
                kept[name + SCALE_SUFFIX] = tuple(part for part in each if part is not None)
    return kept


def _of_scales(part: StoredPart, blocks: Float8Blocks) -> StoredPart | None:
    """The same part of the scales; None: its place begins within a block."""
    sizes = {len(part.shape) - 2: blocks.num_rows, len(part.shape) - 1: blocks.num_columns}
    source = list(part.source)
    for dim, taken in enumerate(part.source):
        size = sizes.get(dim)
        if size is not None and taken != slice(None):
            if taken.start % size or (taken.stop % size and taken.stop != part.shape[dim]):
                raise ConfigError(
                    f"{part.name}: this rank's {taken.start:,} to {taken.stop:,} of "
                    f"{part.shape[dim]:,} cut float8 blocks of {size}",
                    hint="use fewer ranks, or --device cpu, which dequantises the weights",
                )
            source[dim] = slice(taken.start // size, -(-taken.stop // size))
    target = _of_target(part.target, blocks)
    if target is None:
        return None
    return StoredPart(
        part.name + SCALE_SUFFIX, blocks.scale_shape(part.shape), tuple(source), target
    )


def _of_target(target: Index, blocks: Float8Blocks) -> Index | None:
    """Where a parameter's scales lie: its rows follow the expert's number, if there is one."""
    found = list(target)
    for dim, place in enumerate(target):
        if isinstance(place, slice) and place != slice(None):
            if place.start % blocks.num_rows:
                return None
            found[dim] = slice(place.start // blocks.num_rows, -(-place.stop // blocks.num_rows))
    return tuple(found)
