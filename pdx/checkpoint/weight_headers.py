"""What the weight files of a folder hold, read from their headers alone. No torch; any process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from pdx.checkpoint.model_files import weight_files
from pdx.errors import CheckpointError

__all__ = ["StoredTensor", "opened_weights", "read_weight_headers"]

#: Types of floating point that are usable as they are; others are quantized, and mean nothing
#: without their scales.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
#: Bits of a value by safetensors' name of its dtype; what is not here counts as 8.
_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32} | dict.fromkeys(
    ("F16", "BF16", "I16", "U16"), 16
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor on disk."""

    path: Path
    shape: tuple[int, ...]
    #: The type as safetensors spells it: "BF16", "F32", "F8_E4M3", ...
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether its values are weights as they stand."""
        return self.dtype in _FLOATS

    @property
    def is_float8(self) -> bool:
        """Whether its values are weights together with scales beside them."""
        return self.dtype == "F8_E4M3"

    @property
    def num_values(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """On disk."""
        return self.num_values * _BITS.get(self.dtype, 8) // 8


def read_weight_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by name.

    Raises:
        CheckpointError: a file is missing or damaged, or two files hold the same tensor.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        with opened_weights(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name in tensors:
                    raise CheckpointError(
                        f"tensor {name} is in {tensors[name].path.name} and in {path.name}"
                    )
                stored = file.get_slice(name)
                tensors[name] = StoredTensor(
                    path=path, shape=tuple(stored.get_shape()), dtype=stored.get_dtype()
                )
    return tensors


@contextmanager
def opened_weights(path: Path, framework: Literal["numpy", "pt"]) -> Iterator[Any]:
    """safetensors' reader of a file, mapped until the block ends.

    Raises:
        CheckpointError: it is no safetensors file, or not a whole one.
    """
    try:
        file = safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is no safetensors file, or not a whole one: {error}",
            hint="download it again; a clone of a repository may want git lfs pull",
        ) from error
    with file as opened:
        yield opened
