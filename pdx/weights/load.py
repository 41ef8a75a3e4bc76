"""Fill a model's parameters from a folder, or say which do not fit. The rank's main thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from pdx.errors import CheckpointError
from pdx.models.stored import StoredPart, stored_parts
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
        model: its weight table (``pdx.models.stored``) names the checkpoint's tensors.
        folder: a Hugging Face folder.
        dtype: of the parameters; buffers keep theirs.
        on_progress: called with bytes done and bytes in all, once per stored tensor.

    Raises:
        CheckpointError: tensors are missing, unused, of another shape or not of floating point;
            they are named.
    """
    index = WeightIndex.open(folder)
    parts = stored_parts(model, index.tensors)
    _check(parts, index, folder)
    sources: dict[str, list[tuple[str, StoredPart]]] = {}
    for name, own in parts.items():
        for part in own:
            sources.setdefault(part.name, []).append((name, part))
    parameters = dict(model.named_parameters())
    total = sum(p.numel() for p in parameters.values()) * dtype.itemsize
    done = 0
    values: dict[str, torch.Tensor] = {}
    for stored_name, stored in index.read(sources):
        for name, part in sources[stored_name]:
            if name not in values:
                values[name] = torch.empty(parameters[name].shape, dtype=dtype)
                _set(model, name, values[name])
            place = values[name][part.target]
            place.copy_(stored[part.source])
            done += place.nbytes
        on_progress(done, total)


def _set(model: nn.Module, name: str, value: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))


def _check(parts: Mapping[str, tuple[StoredPart, ...]], index: WeightIndex, folder: Path) -> None:
    stored = index.tensors
    wanted = {part.name: part.shape for own in parts.values() for part in own}
    kinds = {
        "missing": [name for name in wanted if name not in stored],
        "unused": [name for name in stored if name not in wanted and not _ignorable(name)],
        "wrong shape": [
            f"{name} is {list(stored[name].shape)}, wanted {list(shape)}"
            for name, shape in wanted.items()
            if name in stored and stored[name].shape != shape
        ],
        "wrong type": [
            f"{name} is {stored[name].dtype}"
            for name in wanted
            if name in stored and not stored[name].is_float
        ],
    }
    problems = [f"{what}: {_listed(names)}" for what, names in kinds.items() if names]
    if problems:
        raise CheckpointError(
            f"{folder}: the weights are not those of its config.json: {'; '.join(problems)}"
        )


def _ignorable(name: str) -> bool:
    # Old checkpoints store the rotary frequencies. A stored output head beside tied embeddings is a
    # copy of them: the model has no such parameter only where its config ties them.
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _listed(names: Iterable[str]) -> str:
    items = list(names)
    more = len(items) - _MAX_LISTED
    return ", ".join(items[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
