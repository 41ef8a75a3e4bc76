"""Incremental decoding: token ids come one by one, text goes out that no later token can change.

Owned by whoever serves one output (a request's handler in the frontend). The pieces, joined, equal
the decoding of the whole sequence. A character whose bytes span tokens is held back until it is
complete or cannot become one any more: three bytes at most. The work for a token does not depend on
the tokens before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import tokenizers

__all__ = ["ByteLevelDetokenizer", "Detokenizer", "PairDetokenizer", "TokenBytes"]

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


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


_EACH_BYTE = "pdx.replace_each_byte"
codecs.register_error(_EACH_BYTE, _replace_each_byte)


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


class PairDetokenizer:
    """For any other tokenizer: a token's text is what it adds to the text of the token before it.

    Decoders treat the start of a text specially (a leading space is dropped, the first word has no
    space in front), and some the end of a word; all of that is seen in a pair. Hidden (special)
    tokens are passed over, so that the next token is not taken for the start of the text.

    Byte-fallback tokens are UTF-8: each byte that is no part of a character becomes U+FFFD, as in
    SentencePiece. The tokenizers library replaces all bytes of a run where one of them is wrong;
    then nothing of a run could be sent before its end.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, hidden_ids: frozenset[int], *, has_bytes: bool
    ) -> None:
        self._inner = inner
        self._hidden_ids = hidden_ids
        self._has_bytes = has_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(_EACH_BYTE)
        #: Ids of the bytes that may still become a character.
        self._open_ids: list[int] = []
        #: The last token that has a text and is no byte; None: there is none yet.
        self._before: int | None = None
        #: Nothing has been decoded, so that the start of the text is still to come.
        self._is_start = True

    def push(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return "".join([self._text_of(i) for i in token_ids if i not in self._hidden_ids])

    def flush(self) -> str:
        """See Detokenizer."""
        self._open_ids.clear()
        return self._utf8.decode(b"", final=True)

    def _text_of(self, token_id: int) -> str:
        token = self._inner.id_to_token(token_id)
        if token is None:
            return ""
        byte = _byte_of_fallback(token) if self._has_bytes else b""
        return self._push_byte(token_id, byte) if byte else self._push_token(token_id)

    def _push_byte(self, token_id: int, byte: bytes) -> str:
        self._open_ids.append(token_id)
        text = self._utf8.decode(byte)
        if not text:
            return ""
        # A byte that cannot go on with one character may begin another.
        is_open = bool(self._utf8.getstate()[0])
        if self._is_start and not is_open:  # a space at the start may be dropped
            text = self._decode(*self._open_ids)
        self._is_start = False
        self._open_ids = [token_id] if is_open else []
        return text

    def _push_token(self, token_id: int) -> str:
        broken = self.flush()
        self._is_start = self._is_start and not broken
        if self._is_start:
            text = self._decode(token_id)
        else:
            # Where only bytes have come, the token itself stands for the one before it.
            before = token_id if self._before is None else self._before
            lead = self._decode(before)
            text = self._decode(before, token_id).removeprefix(lead)
        if text or self._decode(token_id, token_id):
            self._before, self._is_start = token_id, False
        return broken + text

    def _decode(self, *token_ids: int) -> str:
        return self._inner.decode(list(token_ids), skip_special_tokens=False)
