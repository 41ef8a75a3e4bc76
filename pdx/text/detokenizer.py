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
#: Stands for a space in SentencePiece's vocabularies.
_METASPACE = "▁"


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
    """The bytes that each token stands for, looked up once per token. Shared by outputs.

    Of a tokenizer that is not byte-level these are a token's bytes inside a text; at its start a
    leading space may be dropped.
    """

    def __init__(self, inner: tokenizers.Tokenizer, *, is_byte_level: bool) -> None:
        self._inner = inner
        self._is_byte_level = is_byte_level
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Bytes of a token, also of a special one; none for ids without a token (padding rows of
        the logits)."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> bytes:
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if not self._is_byte_level:
            return _byte_of_fallback(token) or token.replace(_METASPACE, " ").encode()
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token, written as plain text
            return token.encode()


def _byte_of_fallback(token: str) -> bytes:
    """The byte that ``<0xNN>`` stands for in a byte-fallback vocabulary."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return b""


class ByteLevelDetokenizer:
    """For byte-level BPE: bytes through a UTF-8 decoder that keeps an unfinished character.
    Constant work per token, and bytes that can no longer become a character are replaced at once
    instead of being held back."""

    def __init__(self, token_bytes: TokenBytes, hidden_ids: frozenset[int]) -> None:
        self._bytes_of = token_bytes.of
        self._hidden_ids = hidden_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        visible = (self._bytes_of(i) for i in token_ids if i not in self._hidden_ids)
        return self._utf8.decode(b"".join(visible))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decode a window that starts before what was already sent, send the
    difference.

    The window keeps the tokens of the last piece in front, because decoders treat the start of a
    text specially (a leading space is dropped). Hidden (special) tokens never enter it: a window of
    nothing else would be empty, and the next token would then be taken for the start.
    """

    def __init__(self, inner: tokenizers.Tokenizer, hidden_ids: frozenset[int]) -> None:
        self._inner = inner
        self._hidden_ids = hidden_ids
        self._window: list[int] = []
        #: Tokens at the window's start whose text has been sent.
        self._num_sent = 0

    def push(self, token_ids: Sequence[int]) -> str:
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

    def flush(self) -> str:
        text = self._unsent()
        self._num_sent = len(self._window)
        return text

    def _unsent(self) -> str:
        sent = self._inner.decode(self._window[: self._num_sent], skip_special_tokens=False)
        return self._inner.decode(self._window, skip_special_tokens=False)[len(sent) :]

    def _is_open(self) -> bool:
        """A byte-fallback token ends the window: the run of bytes is decoded as one, so its end
        must be seen."""
        return bool(_byte_of_fallback(self._inner.id_to_token(self._window[-1]) or ""))

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._hidden_ids and self._inner.id_to_token(token_id) is not None
