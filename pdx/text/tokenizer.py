"""Text to token ids and back. Owns the loaded ``tokenizer.json``; immutable, so any thread may use
it."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from pdx.errors import CheckpointError, InvalidRequest
from pdx.text.detokenizer import ByteLevelDetokenizer, Detokenizer, PairDetokenizer, TokenBytes

__all__ = ["Tokenizer"]

_REPLACEMENT = "\ufffd"
#: While it encodes, the library takes more than a hundred bytes for each byte of a text.
_PIECE_CHARS = 32 << 10
_CHARS_OF_A_TOKEN = 16
#: A piece may have so many tokens more than it has inside its text.
_PIECE_SLACK = 8


class Tokenizer:
    """One model's tokenizer.

    Only ``tokenizer.json`` is read. The class names and flags in ``tokenizer_config.json``
    contradict it in published models; whether a BOS token is put in front is decided by the file's
    own post-processor.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        special = (i for i, token in inner.get_added_tokens_decoder().items() if token.special)
        self._special_ids = frozenset(special)
        decoder = json.loads(inner.to_str()).get("decoder") or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._has_bytes = '"ByteFallback"' in json.dumps(decoder)
        self._token_bytes = TokenBytes(inner, is_byte_level=self._is_byte_level)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load the tokenizer of a Hugging Face folder.

        Raises:
            CheckpointError: there is no ``tokenizer.json``, or it is not one.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist",
                hint="pdx needs the fast tokenizer's file; transformers' save_pretrained writes it",
            )
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of one text. ``add_special_tokens`` is off for text that a chat template has
        rendered."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, max_len: int | None = None
    ) -> list[list[int]]:
        """Token ids of each text. Releases the GIL while it works, which the library's single-text
        call does not; but not while it makes the lists, whence ``max_len``.

        Raises:
            InvalidRequest: a text has lone surrogates, which have no UTF-8 form, or more than
                ``max_len`` tokens.
        """
        if sum(map(len, texts)) <= _PIECE_CHARS:
            return [
                _ids(encoding, max_len) for encoding in self._encodings(texts, add_special_tokens)
            ]
        # One after the other, so that no two of them are in memory as the library has them.
        id_lists = [_ids(self._encodings([t], add_special_tokens)[0], max_len) for t in texts]
        _give_memory_back()
        return id_lists

    def long_beginning(self, text: str, max_len: int) -> tuple[int, int] | None:
        """Characters and tokens of a beginning that has too many tokens for the text to have
        ``max_len`` at most; None where there is none.

        The text is encoded in pieces, in memory that does not grow with it. Where it is cut, tokens
        are others than in the whole: a quarter more than ``max_len`` leaves room for that.
        """
        if len(text) <= max_len:
            return None
        step = min(_PIECE_CHARS, _CHARS_OF_A_TOKEN * max_len)
        num_tokens = 0
        for start in range(0, len(text), step):
            piece = text[start : start + step]
            [encoding] = self._encodings([piece], add_special_tokens=False)
            num_tokens += max(0, len(encoding) - _PIECE_SLACK)
            if num_tokens > max_len + max_len // 4:
                return start + len(piece), num_tokens
        return None

    def _encodings(
        self, texts: Sequence[str], add_special_tokens: bool
    ) -> Sequence[tokenizers.Encoding]:
        try:
            found: Sequence[tokenizers.Encoding] = self._inner.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeEncodeError) as error:  # which of the two depends on its release
            raise InvalidRequest("the text has lone surrogates, which are not Unicode") from error
        return found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Ids that have no token give nothing."""
        text = self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        if not self._has_bytes or _REPLACEMENT not in text:
            return text
        # Bytes that are no characters are read one by one (see PairDetokenizer).
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that one token, also a special one, stands for; none where the id has no
        token."""
        return self._token_bytes.of(token_id)

    def has_token(self, token_id: int) -> bool:
        """The model's vocabulary may be larger than the tokenizer's."""
        return self._inner.id_to_token(token_id) is not None

    def token_of(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it."""
        token: str | None = self._inner.id_to_token(token_id)
        return token

    def detokenizer(
        self, *, skip_special_tokens: bool = True, shown: Iterable[str] = ()
    ) -> Detokenizer:
        """A fresh incremental decoder for one output. ``shown``: tokens that are not skipped,
        though they be special."""
        hidden = self._special_ids if skip_special_tokens else frozenset[int]()
        hidden -= {self._inner.token_to_id(token) for token in shown}
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._token_bytes, hidden)
        return PairDetokenizer(self._inner, hidden, has_bytes=self._has_bytes)


def _ids(encoding: tokenizers.Encoding, max_len: int | None) -> list[int]:
    if max_len is not None and len(encoding) > max_len:
        raise InvalidRequest(f"the text has {len(encoding)} tokens; at most {max_len} are served")
    ids: list[int] = encoding.ids
    return ids


def _give_memory_back() -> None:
    """What was freed, to the system: the C library would keep it. Only glibc can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
