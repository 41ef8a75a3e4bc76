"""Fill a model's parameters from a folder, or say which do not fit. The rank's main thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from pdx.errors import CheckpointError
from pdx.models.sharding import Shard, shards_of
from pdx.weights.index import WeightIndex

__all__ = ["load_parameters"]

#: Names in a message; a wrong checkpoint can have thousands.
_MAX_LISTED = 8


def load_parameters(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None],
) -> None:
    """Replace every parameter of ``model`` (made on the meta device) by the stored one in dtype.

    Weights are copied, not mapped: a file that is replaced or cut short later must not change a
    running model.

    Args:
        model: named as the checkpoint names its tensors; of sharded ones it holds a part.
        folder: a Hugging Face folder.
        dtype: of the parameters; buffers keep theirs.
        on_progress: called with bytes done and bytes in all, once per tensor.

    Raises:
        CheckpointError: tensors are missing, unused, of another shape or not of floating point;
            they are named.
    """
    parameters = dict(model.named_parameters())
    index = WeightIndex.open(folder)
    shards = shards_of(model)
    _check(parameters, shards, index, folder)
    total = sum(p.numel() for p in parameters.values()) * dtype.itemsize
    done = 0
    for name, stored in index.read(list(parameters)):
        owner, _, leaf = name.rpartition(".")
        part = stored
        if (shard := shards.get(name)) is not None:
            part = stored.narrow(shard.dim, shard.start, shard.size)
        value = torch.empty(part.shape, dtype=dtype).copy_(part)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
        done += value.nbytes
        on_progress(done, total)


def _check(
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
    index: WeightIndex,
    folder: Path,
) -> None:
    stored = index.tensors
    missing = [name for name in parameters if name not in stored]
    unused = [name for name in stored if name not in parameters and not _ignorable(name)]
    wanted = {name: _whole_shape(p, shards.get(name)) for name, p in parameters.items()}
    misshaped = [
        f"{name} is {list(stored[name].shape)}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name].shape != shape
    ]
    mistyped = [
        f"{name} is {stored[name].dtype}"
        for name in parameters
        if name in stored and not stored[name].is_float
    ]
    kinds = {
        "missing": missing,
        "unused": unused,
        "wrong shape": misshaped,
        "wrong type": mistyped,
    }
    problems = [f"{what}: {_listed(names)}" for what, names in kinds.items() if names]
    if problems:
        raise CheckpointError(
            f"{folder}: the weights are not those of its config.json: {'; '.join(problems)}"
        )


def _whole_shape(parameter: nn.Parameter, shard: Shard | None) -> tuple[int, ...]:
    """Of the stored tensor, of which the parameter holds a shard or all."""
    shape = list(parameter.shape)
    if shard is not None:
        shape[shard.dim] = shard.whole
    return tuple(shape)


def _ignorable(name: str) -> bool:
    # Old checkpoints store the rotary frequencies. A stored output head beside tied embeddings is a
    # copy of them: the model has no such parameter only where its config ties them.
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _listed(names: Iterable[str]) -> str:
    items = list(names)
    more = len(items) - _MAX_LISTED
    return ", ".join(items[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
