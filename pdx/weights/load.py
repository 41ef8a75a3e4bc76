"""Fill a model's parameters from a folder, or say which do not fit. The rank's main thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from pdx.config.quantization import SCALE_SUFFIX, Float8Blocks
from pdx.config.weight_headers import StoredTensor
from pdx.errors import CheckpointError
from pdx.models.stored import StoredPart, stored_parts
from pdx.weights.float8 import dequantised
from pdx.weights.index import WeightIndex
from pdx.weights.kept_float8 import kept_scales
from pdx.weights.kv_scales import load_kv_scales
from pdx.weights.memory import ParameterMemory

__all__ = ["load_parameters"]

#: Names in a message; a wrong checkpoint can have thousands.
_MAX_LISTED = 8
_CPU = torch.device("cpu")


def load_parameters(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None],
    quantization: Float8Blocks | None = None,
    left_on_disk: nn.Module | None = None,
    device: torch.device = _CPU,
    check_room: Callable[[int], None] = lambda num_bytes: None,
    keeps_float8: bool = False,
) -> None:
    """Replace every parameter of ``model`` (made on the meta device) by the stored one in dtype.

    Weights are copied, not mapped: a file that is replaced or cut short later must not change a
    running model. Of a sharded tensor only this rank's part is read.

    Args:
        model: its weight table (``pdx.models.stored``) names the checkpoint's tensors.
        folder: a Hugging Face folder.
        dtype: of the parameters, but for those that a module names in ``float32``; buffers keep
            theirs.
        on_progress: called with bytes done and bytes in all, once per stored tensor.
        quantization: of the weights that are stored as float8.
        left_on_disk: parts of the checkpoint that are not used. It has all of their tensors or
            none; those that it has are checked like the others.
        device: where the parameters, and the model's buffers, go.
        check_room: told of the parameters' bytes before the first is made; may refuse.
        keeps_float8: whether float8 weights stay as they are, with their scales, in modules that
            take them so (``float8``); else all are dequantised.

    Raises:
        CheckpointError: tensors are missing, unused, of another shape or of a type that is not
            served; they are named.
        ConfigError: float8 weights cannot be kept so.
    """
    index = WeightIndex.open(folder)
    parts = stored_parts(model, index.tensors)
    scales_of_kv = load_kv_scales(model, index)
    checked = parts | _left_on_disk(left_on_disk, index)
    scales = _scales_of(checked, index, quantization)
    _check(checked, scales, index, folder, quantization, scales_of_kv)
    kept: dict[str, tuple[StoredPart, ...]] = {}
    if keeps_float8 and quantization is not None:
        kept = kept_scales(model, parts, index, quantization)
        _make_room_for_scales(model, kept, quantization)
    in_float8 = {name.removesuffix(SCALE_SUFFIX) for name in kept}
    values = _Values(model, dtype, device, in_float8)
    check_room(values.total_bytes)
    fills: dict[str, list[tuple[str, StoredPart]]] = {}
    for name, own in (parts | kept).items():
        for part in own:
            fills.setdefault(part.name, []).append((name, part))
    # Views of mapped files: no memory is theirs.
    scale_values = dict(index.read(scales[name] for name in fills if name in scales))
    for stored_name, stored in index.read(fills):
        for name, part in fills[stored_name]:
            if stored_name in scales and name not in in_float8:
                assert quantization is not None
                scale = scale_values[scales[stored_name]]
                values.fill(name, part, dequantised(stored, scale, part.source, quantization))
            else:
                values.fill(name, part, stored[part.source])
        on_progress(values.done_bytes, values.total_bytes)
    model.to(device)  # its buffers: the parameters are there


class _Values:
    """The parameters of a model, each made when its first part comes."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        in_float8: Collection[str],
    ) -> None:
        self._model = model
        self._made: dict[str, torch.Tensor] = {}
        self._empty = {
            name: (
                parameter.shape,
                torch.float8_e4m3fn if name in in_float8 else _dtype_of(model, name, dtype),
            )
            for name, parameter in model.named_parameters()
        }
        self.done_bytes = 0
        sizes = [shape.numel() * own_dtype.itemsize for shape, own_dtype in self._empty.values()]
        self.total_bytes = sum(sizes)
        self._memory = ParameterMemory(sizes, device)

    def fill(self, name: str, part: StoredPart, value: torch.Tensor) -> None:
        """Copy a part to its place."""
        if name not in self._made:
            shape, dtype = self._empty[name]
            self._made[name] = made = self._memory.empty(shape, dtype)
            owner, leaf = _owner(self._model, name)
            setattr(owner, leaf, nn.Parameter(made, requires_grad=False))
        place = self._made[name][part.target]
        place.copy_(value)
        self.done_bytes += place.nbytes


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _dtype_of(model: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    owner, leaf = _owner(model, name)
    is_wide = leaf.endswith(SCALE_SUFFIX) or leaf in getattr(owner, "float32", ())
    return torch.float32 if is_wide else dtype


def _make_room_for_scales(
    model: nn.Module, names: Iterable[str], quantization: Float8Blocks
) -> None:
    for name in names:
        owner, leaf = _owner(model, name)
        weight = getattr(owner, leaf.removesuffix(SCALE_SUFFIX))
        shape = quantization.scale_shape(tuple(weight.shape))
        scales = torch.empty(shape, device="meta")
        setattr(owner, leaf, nn.Parameter(scales, requires_grad=False))


def _left_on_disk(
    module: nn.Module | None, index: WeightIndex
) -> dict[str, tuple[StoredPart, ...]]:
    parts = {} if module is None else stored_parts(module, index.tensors)
    is_there = any(part.name in index.tensors for own in parts.values() for part in own)
    return parts if is_there else {}


def _scales_of(
    parts: Mapping[str, tuple[StoredPart, ...]],
    index: WeightIndex,
    quantization: Float8Blocks | None,
) -> dict[str, str]:
    """By name of each float8 tensor that is wanted, that of its scales."""
    if quantization is None:
        return {}
    names = dict.fromkeys(part.name for own in parts.values() for part in own)
    return {
        name: name + SCALE_SUFFIX
        for name in names
        if name in index.tensors and index.tensors[name].is_float8
    }


def _check(
    parts: Mapping[str, tuple[StoredPart, ...]],
    scales: Mapping[str, str],
    index: WeightIndex,
    folder: Path,
    quantization: Float8Blocks | None,
    read_already: Collection[str],
) -> None:
    stored = index.tensors
    wanted = {part.name: part.shape for own in parts.values() for part in own}
    served = {name for name in stored if stored[name].is_float or name in scales}
    if quantization is not None:
        wanted |= {scales[name]: quantization.scale_shape(wanted[name]) for name in scales}
    kinds = {
        "missing": [name for name in wanted if name not in stored],
        "unused": [
            name
            for name in stored
            if name not in wanted and name not in read_already and not _ignorable(name)
        ],
        "wrong shape": [
            f"{name} is {list(stored[name].shape)}, wanted {list(shape)}"
            for name, shape in wanted.items()
            if name in stored and stored[name].shape != shape
        ],
        "wrong type": [
            f"{name} is {stored[name].dtype}"
            for name in wanted
            if name in stored and name not in served
        ],
    }
    problems = [f"{what}: {_listed(names)}" for what, names in kinds.items() if names]
    if problems:
        raise CheckpointError(
            f"{folder}: the weights are not those of its config.json: {'; '.join(problems)}",
            hint=_hint(stored, quantization),
        )


def _hint(stored: Mapping[str, StoredTensor], quantization: Float8Blocks | None) -> str:
    if quantization is None and any(tensor.is_float8 for tensor in stored.values()):
        return "float8 weights want the quantization_config of their config.json"
    return "config.json and weight files have to be of one model: download the folder again"


def _ignorable(name: str) -> bool:
    # Old checkpoints store the rotary frequencies. A stored output head beside tied embeddings is a
    # copy of them: the model has no such parameter only where its config ties them.
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _listed(names: Iterable[str]) -> str:
    items = list(names)
    more = len(items) - _MAX_LISTED
    return ", ".join(items[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
