"""What two nodes must agree on before the first request. Exchanged in the handshake; compared field
by field.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from pathlib import Path

import msgspec

from pdx.checkpoint.layers import LayerGroup
from pdx.checkpoint.model_files import template_files, weight_files
from pdx.errors import ProtocolError
from pdx.kv.geometry import ITEMSIZE
from pdx.kv.layout import KvLayout, NodeLayout, kv_heads_of_rank

__all__ = ["Manifest", "differences", "model_id", "text_id"]

#: This much of each weights file is hashed besides its header: other weights of the same shape
#: differ there.
_SAMPLE_BYTES = 64 << 10
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.json",
    "special_tokens_map.json",
)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A node's model, numerics and KV layout. What the plan of a transfer bridges may differ: the
    number of pages, their size, the number of ranks.
    """

    weights_id: str
    text_id: str
    #: All layers, each in one group. One group is served today.
    layer_groups: tuple[LayerGroup, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    tp_size: int
    kv_layout: str
    num_pages: int
    #: What each rank's memory begins at a multiple of, in bytes.
    kv_alignment: int = mmap.PAGESIZE
    #: Parts of a head in a page: K and V, or 1 where a token has one record for both.
    num_parts: int = 2
    #: The type of the KV cache; None: ``dtype``.
    kv_dtype: str | None = None

    def layout(self) -> NodeLayout:
        """The node's KV memory.

        Raises:
            ProtocolError: no node can have such a memory.
        """
        heads, tp_size = self.num_kv_heads, self.tp_size
        layers = [layer for group in self.layer_groups for layer in group.layers]
        sizes = (len(layers), self.head_dim, self.page_size, self.num_pages, self.kv_alignment)
        splits = min(heads, tp_size, self.num_parts, *sizes) > 0 and (
            heads % tp_size == 0 or tp_size % heads == 0
        )
        kv_dtype = self.kv_dtype or self.dtype
        is_one_group = len(self.layer_groups) == 1 and layers == list(range(len(layers)))
        if not splits or not is_one_group or kv_dtype not in ITEMSIZE:
            raise ProtocolError(f"a manifest describes a KV memory that cannot be: {self}")
        rank = KvLayout(
            group=self.layer_groups[0].name,
            num_layers=len(layers),
            num_kv_heads=len(kv_heads_of_rank(heads, tp_size, 0)),
            head_dim=self.head_dim,
            page_size=self.page_size,
            num_pages=self.num_pages,
            itemsize=ITEMSIZE[kv_dtype],
            num_parts=self.num_parts,
        )
        return NodeLayout(
            rank=rank, tp_size=tp_size, num_kv_heads=heads, alignment=self.kv_alignment
        )


_MAY_DIFFER = frozenset({"num_pages", "page_size", "tp_size", "kv_alignment"})


def differences(ours: Manifest, theirs: Manifest, *, us: str, them: str) -> str | None:
    """A two-column table of the fields that do not match; None when all do."""
    rows = [
        (field, _shown(getattr(ours, field)), _shown(getattr(theirs, field)))
        for field in Manifest.__struct_fields__
        if field not in _MAY_DIFFER and getattr(ours, field) != getattr(theirs, field)
    ]
    if not rows:
        return None
    table = [("", us, them), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def _shown(value: object) -> str:
    match value:
        case tuple():
            return ", ".join(f"{group.name} ({len(group.layers)} layers)" for group in value)
        case _:
            return str(value)


def model_id(folder: Path) -> str:
    """Hash of config.json, every safetensors header and 64 KiB of each file's data."""
    digest = hashlib.blake2b(digest_size=16)
    config = json.loads((folder / "config.json").read_bytes())
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in weight_files(folder):
        with path.open("rb") as file:
            prefix = file.read(8)
            digest.update(prefix)
            digest.update(file.read(struct.unpack("<Q", prefix)[0]))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def text_id(folder: Path) -> str:
    """Hash of the tokenizer and the chat templates."""
    digest = hashlib.blake2b(digest_size=16)
    files = {name: folder / name for name in _TEXT_FILES}
    files |= {f"{name}.jinja": path for name, path in template_files(folder).items()}
    for name, path in files.items():
        if path.exists():
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
