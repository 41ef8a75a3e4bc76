"""Checkpoints of any size that take no disk: real headers over files that are one hole (zeros)."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.quantization import SCALE_SUFFIX
from pdx.kernels.ops import REFERENCE_OPS
from pdx.models.registry import build_drafts, build_model
from pdx.models.stored import stored_parts

__all__ = ["write_hollow_checkpoint", "write_hollow_file"]

_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
#: Name of a tensor to its type, as safetensors spells it, and shape.
Tensors = Mapping[str, tuple[str, Sequence[int]]]


def write_hollow_checkpoint(folder: Path, fields: dict[str, Any], num_files: int = 1) -> int:
    """A folder for a config.json: what a model of it wants, draft layers as well, in bfloat16, or
    the layers' matrices in float8 where the config has blocks. Returns the bytes of the tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = _tensors(ModelConfig.load(folder))
    names = sorted(tensors)
    weight_map = {}
    for index in range(num_files):
        file = f"model-{index + 1:05}-of-{num_files:05}.safetensors"
        part = names[index * len(names) // num_files : (index + 1) * len(names) // num_files]
        write_hollow_file(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))
    return sum(math.prod(shape) * _BYTES[dtype] for dtype, shape in tensors.values())


def write_hollow_file(path: Path, tensors: Tensors) -> None:
    """One safetensors file."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)


def _tensors(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        modules = build_model(config, REFERENCE_OPS), build_drafts(config, REFERENCE_OPS)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for module in modules:
        for parts in stored_parts(module, ()).values():
            for part in parts:
                is_matrix = len(part.shape) == 2 and ".layers." in part.name
                if config.quantization and is_matrix and "mlp.gate." not in part.name:
                    tensors[part.name] = "F8_E4M3", part.shape
                    scales = config.quantization.scale_shape(part.shape)
                    tensors[part.name + SCALE_SUFFIX] = "F32", scales
                else:
                    tensors[part.name] = "BF16", part.shape
    return tensors
