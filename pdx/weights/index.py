"""What a folder's weight files hold: each tensor's file and shape, read from the headers alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pdx.config.model_files import weight_files
from pdx.errors import CheckpointError

__all__ = ["StoredTensor", "WeightIndex"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor on disk."""

    path: Path
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightIndex:
    """All tensors of a checkpoint by name."""

    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> WeightIndex:
        """Read the headers.

        Raises:
            CheckpointError: a file is missing or damaged, or two files hold the same tensor.
        """
        tensors: dict[str, StoredTensor] = {}
        for path in weight_files(folder):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    if name in tensors:
                        raise CheckpointError(
                            f"tensor {name} is in {tensors[name].path.name} and in {path.name}"
                        )
                    shape = tuple(file.get_slice(name).get_shape())
                    tensors[name] = StoredTensor(path=path, shape=shape)
        return cls(tensors=tensors)

    def read(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, file by file; each is a view of the mapped file until it is copied."""
        for path in sorted({self.tensors[name].path for name in names}):
            with _opened(path) as file:
                for name in names:
                    if self.tensors[name].path == path:
                        yield name, file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from error
    with file as opened:
        yield opened
