"""Which files of a model folder hold its weights and its chat templates. No torch: the manifest
hashes them too."""

from __future__ import annotations

import re
from pathlib import Path

from pdx.checkpoint.model_fields import read_json
from pdx.errors import CheckpointError

__all__ = ["has_weight_files", "template_files", "weight_files"]

_INDEX = "model.safetensors.index.json"
_AGAIN = "download the folder again"
_SHARD = re.compile(r"-of-(\d+)\.safetensors$")


def has_weight_files(folder: Path) -> bool:
    """Whether any weights are there; a folder may hold only what describes a model."""
    return any(folder.glob("*.safetensors"))


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files by name: those that the index names, else ``model*.safetensors``.

    Other safetensors files beside them (adapters, goldens, another precision) are not the model's
    and are left alone.

    Raises:
        CheckpointError: the index is damaged, a file it names is missing, or there is no file at
            all.
    """
    index = folder / _INDEX
    if not index.exists():
        found = tuple(sorted(folder.glob("model*.safetensors")))
        if not found:
            raise CheckpointError(
                f"{folder} holds no model*.safetensors", hint="pdx reads safetensors weights only"
            )
        shards = {int(match[1]) for path in found if (match := _SHARD.search(path.name))}
        if shards and shards != {len(found)}:
            raise CheckpointError(
                f"{folder} holds {len(found)} of {max(shards)} weight files and no index",
                hint=_AGAIN,
            )
        return found
    files = tuple(folder / name for name in _names_in(index))
    missing = [path.name for path in files if not path.exists()]
    if missing:
        listed = ", ".join(missing)
        raise CheckpointError(f"{index} names files that are missing: {listed}", hint=_AGAIN)
    return files


def template_files(folder: Path) -> dict[str, Path]:
    """Chat templates that are files of their own, by name: ``chat_template.jinja`` is the default,
    the others are in ``additional_chat_templates`` (transformers 5 writes both)."""
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    default = folder / "chat_template.jinja"
    return files | ({"default": default} if default.is_file() else {})


def _names_in(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    # A name with a folder in it could point anywhere on the disk.
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointError(
            f"{index}: weight_map does not name files of this folder", hint=_AGAIN
        )
    return sorted(set(names))
