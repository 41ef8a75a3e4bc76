"""Incremental decoding: token ids come one by one, text goes out that no later token can change.

Owned by whoever serves one output (a request's handler in the frontend). The pieces, joined, equal
the decoding of the whole sequence. A character whose bytes span tokens is held back until it is
complete.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import tokenizers

__all__ = ["ByteLevelDetokenizer", "Detokenizer", "TokenBytes", "WindowDetokenizer"]

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Decoder of one output."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""

    def flush(self) -> str:
        """The rest, at the end of the output: an unfinished character becomes U+FFFD."""


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for
    U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class TokenBytes:
    """The bytes that each token of a byte-level tokenizer stands for, looked up once per token.
    Shared by outputs."""

    def __init__(self, inner: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._inner = inner
        self._known: dict[int, bytes] = dict.fromkeys(special_ids, b"")

    def of(self, token_id: int) -> bytes:
        """Bytes of a token; none for special tokens and for ids without a token (padding rows of
        the logits)."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> bytes:
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token, written as plain text
            return token.encode()


class ByteLevelDetokenizer:
    """For byte-level BPE: bytes through a UTF-8 decoder that keeps an unfinished character.
    Constant work per token, and bytes that can no longer become a character are replaced at once
    instead of being held back."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes_of = token_bytes.of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:  # noqa: D102 - see Detokenizer
        return self._utf8.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:  # noqa: D102 - see Detokenizer
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decode a window that starts before what was already sent, send the
    difference.

    The window keeps the tokens of the last piece in front, because decoders treat the start of a
    text specially (a leading space is dropped). Special tokens never enter it: a window of nothing
    else would be empty, and the next token would then be taken for the start.
    """

    def __init__(self, inner: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._inner = inner
        self._special_ids = special_ids
        self._window: list[int] = []
        #: Tokens at the window's start whose text has been sent.
        self._num_sent = 0

    def push(self, token_ids: Sequence[int]) -> str:  # noqa: D102 - see Detokenizer
        visible = [i for i in token_ids if self._is_visible(i)]
        if not visible:
            return ""
        self._window += visible
        if self._is_open():
            return ""
        text = self._unsent()
        if text.endswith(_REPLACEMENT):
            return ""
        del self._window[: self._num_sent]
        self._num_sent = len(self._window)
        return text

    def flush(self) -> str:  # noqa: D102 - see Detokenizer
        text = self._unsent()
        self._num_sent = len(self._window)
        return text

    def _unsent(self) -> str:
        sent = self._inner.decode(self._window[: self._num_sent], skip_special_tokens=True)
        return self._inner.decode(self._window, skip_special_tokens=True)[len(sent) :]

    def _is_open(self) -> bool:
        """A byte-fallback token ends the window: the run of bytes is decoded as one, so its end
        must be seen."""
        token = self._inner.id_to_token(self._window[-1]) or ""
        return len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._inner.id_to_token(token_id) is not None
