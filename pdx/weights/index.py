"""A folder's tensors: what they are by their headers, and their values, file by file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from pdx.checkpoint.weight_headers import StoredTensor, opened_weights, read_weight_headers

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

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, file by file; each is a view of the mapped file until it is copied."""
        by_path: dict[Path, list[str]] = {}
        for name in names:
            by_path.setdefault(self.tensors[name].path, []).append(name)
        for path in sorted(by_path):
            with opened_weights(path, "pt") as file:
                for name in by_path[path]:
                    yield name, file.get_tensor(name)
