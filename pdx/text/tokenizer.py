"""Text to token ids and back. Owns the loaded ``tokenizer.json``; immutable, so any thread may use
it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from pdx.errors import CheckpointError, InvalidRequest
from pdx.text.detokenizer import ByteLevelDetokenizer, Detokenizer, PairDetokenizer, TokenBytes

__all__ = ["Tokenizer"]

_REPLACEMENT = "\ufffd"


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
        encodings = self._encodings(texts, add_special_tokens)
        longest = max(map(len, encodings), default=0)
        if max_len is not None and longest > max_len:
            raise InvalidRequest(f"the text has {longest} tokens; at most {max_len} are served")
        return [encoding.ids for encoding in encodings]

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has. Making the list of a million ids holds the GIL; counting
        them does not."""
        return [len(encoding) for encoding in self._encodings(texts, add_special_tokens=True)]

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
