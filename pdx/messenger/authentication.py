"""How two nodes that share a secret prove that to each other before a link is made. Pure.

    decoder                                         prefiller
    Hello | Describe {nonce}    ------------------>
                                <------------------ Challenge {nonce}
    Proof {mac}                 ------------------>
                                <------------------ Welcome | Description {mac}

Each code is HMAC-SHA256 over the sender's role, the opening message and the prefiller's nonce, and
the prefiller's also over its answer. So both ends know that the other one has the secret, now, and
that nobody has changed what a link depends on: descriptors and keys, layouts, the process behind
it. What follows on the connection is neither signed nor encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from pdx.messenger.messages import Describe, Description, Hello, Welcome

__all__ = ["decoder_code", "fresh_nonce", "is_equal", "prefiller_code"]

_NONCE_BYTES = 32


def fresh_nonce() -> bytes:
    """What makes a code good for one handshake."""
    return secrets.token_bytes(_NONCE_BYTES)


def decoder_code(secret: bytes, opening: Hello | Describe, nonce: bytes) -> bytes:
    """What the decoder answers to a challenge."""
    return _code(secret, b"pdx decoder", msgspec.msgpack.encode(opening), nonce)


def prefiller_code(
    secret: bytes, opening: Hello | Describe, nonce: bytes, answer: Welcome | Description
) -> bytes:
    """What the prefiller puts into its answer."""
    unsigned = msgspec.structs.replace(answer, mac=b"")
    parts = (msgspec.msgpack.encode(opening), nonce, msgspec.msgpack.encode(unsigned))
    return _code(secret, b"pdx prefiller", *parts)


def is_equal(code: bytes, expected: bytes) -> bool:
    """Takes the same time whatever is wrong."""
    return hmac.compare_digest(code, expected)


def _code(secret: bytes, *parts: bytes) -> bytes:
    """The code of a list of parts. Their lengths are in it, so that no two lists have one text."""
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.new(secret, text, hashlib.sha256).digest()
