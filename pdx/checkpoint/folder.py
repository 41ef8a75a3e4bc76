"""Whether a folder's tensors are those of its config.json: each is used, or known to be a copy, or
the error names it. From headers; no torch. The loader, ``--check`` and ``pdx inspect model`` ask.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import re
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.quantization import SCALE_SUFFIX, Float8Blocks
from pdx.checkpoint.stored_tensors import (
    EMBEDDING,
    HEAD,
    draft_tensors,
    kv_scale_tensors,
    wanted_tensors,
)
from pdx.checkpoint.weight_headers import StoredTensor, read_weight_headers
from pdx.errors import CheckpointError

__all__ = ["Checkpoint", "check_tensors", "copies", "float8_scales", "with_stored_head"]

#: Names in a message; a wrong checkpoint can have thousands.
_MAX_LISTED = 8
#: Old checkpoints store the rotary frequencies, which follow from the config.
_ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
#: Bytes of two tensors that are compared at once.
_COMPARED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder that can be loaded, as far as its small files and the headers of its weights say."""

    folder: Path
    model: ModelConfig
    tensors: Mapping[str, StoredTensor]
    #: Findings that refuse nothing, but that a user should know.
    warnings: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read a local Hugging Face folder.

        Raises:
            CheckpointError: it cannot be served; what is missing or too much is named.
        """
        model = ModelConfig.load(folder)
        return cls.of(folder, model, read_weight_headers(folder))

    @classmethod
    def of(
        cls, folder: Path, model: ModelConfig, tensors: Mapping[str, StoredTensor]
    ) -> Checkpoint:
        """The same of what was read already. Raises as :meth:`read` does."""
        resolved = with_stored_head(model, tensors)
        warnings = []
        if resolved is not model:
            warnings.append(
                f"config.json ties the output head to the embedding, but {HEAD} is stored and is "
                "another: the stored head is used"
            )
        _check_config_tensors(folder, resolved, tensors)
        adapter = folder / "adapter_config.json"
        if adapter.exists():
            warnings.append(f"{adapter.name} lies beside the model: adapters are not applied")
        return cls(folder=folder, model=resolved, tensors=tensors, warnings=tuple(warnings))


def with_stored_head(model: ModelConfig, tensors: Mapping[str, StoredTensor]) -> ModelConfig:
    """The same model, untied where its checkpoint stores an output head that is not a copy of the
    embedding; so transformers 5 reads it.
    """
    if model.tie_word_embeddings and HEAD in tensors and HEAD not in copies(tensors):
        return dataclasses.replace(model, tie_word_embeddings=False)
    return model


def copies(tensors: Mapping[str, StoredTensor]) -> frozenset[str]:
    """Stored tensors that are left out because they say nothing new: rotary frequencies, and an
    output head that is the embedding again, byte for byte.

    Of weights that are not on this disk (a model of the hub) a head of the embedding's shape and
    type is taken for its copy.
    """
    left_out = {name for name in tensors if _ROTARY_BUFFER.fullmatch(name)}
    if HEAD in tensors and EMBEDDING in tensors and _are_equal(tensors, HEAD, EMBEDDING):
        left_out.add(HEAD)
    return frozenset(left_out)


def check_tensors(
    wanted: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
    folder: Path,
    quantization: Float8Blocks | None,
    left_out: Collection[str],
) -> None:
    """Whether every wanted tensor is there in its shape and a type that is served, and every stored
    one is wanted.

    Args:
        wanted: shapes, but for the scales of float8 blocks.
        left_out: stored names that need not be wanted.

    Raises:
        CheckpointError: naming what does not fit.
    """
    scales = float8_scales(wanted, stored, quantization)
    served = {name for name in stored if stored[name].is_float or name in scales}
    if quantization is not None:
        shapes = {scales[name]: quantization.scale_shape(wanted[name]) for name in scales}
        wanted = {**wanted, **shapes}
    kinds = {
        "missing": [name for name in wanted if name not in stored],
        "unused": [name for name in stored if name not in wanted and name not in left_out],
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
            hint=_hint(kinds["missing"], stored, quantization),
        )


def float8_scales(
    wanted: Iterable[str],
    stored: Mapping[str, StoredTensor],
    quantization: Float8Blocks | None,
) -> dict[str, str]:
    """The name of the scales of each float8 tensor that is wanted, by the tensor's name."""
    if quantization is None:
        return {}
    return {
        name: name + SCALE_SUFFIX for name in wanted if name in stored and stored[name].is_float8
    }


def _check_config_tensors(
    folder: Path, model: ModelConfig, stored: Mapping[str, StoredTensor]
) -> None:
    wanted = wanted_tensors(model, stored)
    drafts = draft_tensors(model, stored)
    # A checkpoint has all of its drafting layers or none.
    if any(name in stored for name in drafts):
        wanted |= drafts
    kv_scales = kv_scale_tensors(model) & stored.keys()
    wrong = [name for name in sorted(kv_scales) if stored[name].num_values != 1]
    if wrong:
        shape = list(stored[wrong[0]].shape)
        raise CheckpointError(f"{folder}: {wrong[0]} is {shape}, not one positive number")
    check_tensors(wanted, stored, folder, model.quantization, kv_scales | copies(stored))


def _are_equal(tensors: Mapping[str, StoredTensor], one: str, other: str) -> bool:
    a, b = tensors[one], tensors[other]
    if (a.shape, a.dtype) != (b.shape, b.dtype) or one + SCALE_SUFFIX in tensors:
        return False
    if not (a.path.exists() and b.path.exists()):
        return True
    with _Data(a.path, one) as first, _Data(b.path, other) as second:
        return all(
            first.piece(start) == second.piece(start)
            for start in range(0, a.num_bytes, _COMPARED_BYTES)
        )


class _Data:
    """A tensor's bytes in its file, which is mapped until the block ends."""

    def __init__(self, path: Path, name: str) -> None:
        with path.open("rb") as file:
            header_len = struct.unpack("<Q", file.read(8))[0]
            begin, end = json.loads(file.read(header_len))[name]["data_offsets"]
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._begin, self._end = 8 + header_len + begin, 8 + header_len + end

    def __enter__(self) -> _Data:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def piece(self, start: int) -> bytes:
        """Some bytes from ``start`` on."""
        first = self._begin + start
        return self._file[first : min(first + _COMPARED_BYTES, self._end)]


def _hint(
    missing: Collection[str], stored: Mapping[str, StoredTensor], quantization: Float8Blocks | None
) -> str:
    if quantization is None and any(tensor.is_float8 for tensor in stored.values()):
        return "float8 weights want the quantization_config of their config.json"
    if list(missing) == [HEAD]:
        return (
            "a model whose output head is the embedding says so in config.json: "
            '"tie_word_embeddings": true'
        )
    return "config.json and weight files have to be of one model: download the folder again"


def _listed(names: Iterable[str]) -> str:
    items = list(names)
    more = len(items) - _MAX_LISTED
    return ", ".join(items[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
