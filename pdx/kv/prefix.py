"""Names of KV pages by content: a hash of all tokens up to the page's end. Pure.

Equal on all hosts and in all processes: BLAKE2b over bytes that are written out here, with nothing
of Python's own hashing in it.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

__all__ = ["next_key", "root_key"]

_DIGEST_BYTES = 16


def root_key(*parts: str) -> bytes:
    """What all pages' keys of one kind descend from.

    Args:
        parts: whatever makes the same tokens another KV cache: weights, dtype, page size, layout,
            the request's salt, the group of layers.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def next_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the page that holds these tokens, after the pages whose last one is the parent."""
    tokens = array("I", token_ids)
    if sys.byteorder != "little":
        tokens.byteswap()
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=_DIGEST_BYTES).digest()
