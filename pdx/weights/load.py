"""Fill a model's parameters from a folder, or say which do not fit. The rank's main thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch
from torch import nn

from pdx.checkpoint.folder import check_tensors, copies, float8_scales
from pdx.checkpoint.quantization import SCALE_SUFFIX, Float8Blocks
from pdx.errors import CheckpointError
from pdx.models.stored import StoredPart, stored_parts
from pdx.weights.float8 import dequantised
from pdx.weights.index import WeightIndex
from pdx.weights.kept_float8 import kept_scales
from pdx.weights.kv_scales import load_kv_scales
from pdx.weights.memory import ParameterMemory

__all__ = ["load_parameters"]

_CPU = torch.device("cpu")
_DAMAGED_HINT = "nothing can be computed with it: download the weights again"
_FLOAT16_HINT = "its range ends at 65,504: use --dtype bfloat16 or float32, if the file is whole"


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
            served, or hold what is no number; they are named.
        ConfigError: float8 weights cannot be kept so.
    """
    index = WeightIndex.open(folder)
    parts = stored_parts(model, index.tensors)
    scales_of_kv = load_kv_scales(model, index)
    checked = parts | _left_on_disk(left_on_disk, index)
    wanted = {part.name: part.shape for own in checked.values() for part in own}
    left_out = scales_of_kv | copies(index.tensors)
    check_tensors(wanted, index.tensors, folder, quantization, left_out)
    scales = float8_scales(wanted, index.tensors, quantization)
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
        if not _is_finite(place):
            kind = str(place.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{part.name} holds NaN or an infinity, as {kind}",
                hint=_FLOAT16_HINT if place.dtype == torch.float16 else _DAMAGED_HINT,
            )
        self.done_bytes += place.nbytes


def _is_finite(values: torch.Tensor) -> bool:
    """One reading of memory that was just written. The extremes show it: NaN is either of them."""
    if values.dtype == torch.float8_e4m3fn:  # it has no infinity
        return not bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any())
    if not values.numel():
        return True
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())


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
