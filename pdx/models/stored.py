"""The weight table: which stored tensors a parameter is made of, and which part of each.

Most parameters are one tensor of their own name, whole or a shard; a module whose parameters are
not says so in ``stored``: for each parameter the ways in which a checkpoint may hold it.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import nn

from pdx.models.sharding import Shard

__all__ = ["StoredPart", "stored_parts"]

Index: TypeAlias = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Part of a stored tensor and the place in a parameter that it fills."""

    #: The tensor's name; in a module's ``stored``, without the module's own name before it.
    name: str
    #: The whole tensor's shape.
    shape: tuple[int, ...]
    #: What is taken of the tensor: leading dimensions, the others whole.
    source: tuple[slice, ...]
    #: What is filled of the parameter, likewise.
    target: Index


def stored_parts(model: nn.Module, tensors: Container[str]) -> dict[str, tuple[StoredPart, ...]]:
    """The parts of a checkpoint's ``tensors`` that fill each parameter, by its name."""
    found = {}
    for prefix, module in model.named_modules():
        shards: dict[str, Shard] = getattr(module, "shards", {})
        table: dict[str, tuple[tuple[StoredPart, ...], ...]] = getattr(module, "stored", {})
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if leaf in table:
                found[name] = _choose(table[leaf], prefix, tensors)
            else:
                found[name] = (_of_its_name(name, parameter, shards.get(leaf)),)
    return found


def _choose(
    ways: tuple[tuple[StoredPart, ...], ...], prefix: str, tensors: Container[str]
) -> tuple[StoredPart, ...]:
    """The first way of which the checkpoint has a tensor; the first of all where it has none."""
    named = [tuple(replace(part, name=f"{prefix}.{part.name}") for part in way) for way in ways]
    return next((way for way in named if any(part.name in tensors for part in way)), named[0])


def _of_its_name(name: str, parameter: nn.Parameter, shard: Shard | None) -> StoredPart:
    shape = list(parameter.shape)
    if shard is None:
        return StoredPart(name, tuple(shape), (), ())
    shape[shard.dim] = shard.whole
    source = (*[slice(None)] * shard.dim, slice(shard.start, shard.stop))
    return StoredPart(name, tuple(shape), source, ())
