"""A folder's tensors: what they are by their headers, and their values, file by file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from pdx.config.weight_headers import StoredTensor, opened_weights, read_weight_headers

__all__ = ["WeightIndex"]


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
        return cls(tensors=read_weight_headers(folder))

    def read(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, file by file; each is a view of the mapped file until it is copied."""
        for path in sorted({self.tensors[name].path for name in names}):
            with opened_weights(path, "pt") as file:
                for name in names:
                    if self.tensors[name].path == path:
                        yield name, file.get_tensor(name)
