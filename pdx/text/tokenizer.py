"""Text to token ids and back. Owns the loaded ``tokenizer.json``; immutable, so any thread may use
it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from pdx.errors import CheckpointError, InvalidRequest
from pdx.text.detokenizer import ByteLevelDetokenizer, Detokenizer, TokenBytes, WindowDetokenizer

__all__ = ["Tokenizer"]


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
        self._token_bytes = _token_bytes(inner, self._special_ids)

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
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text. Releases the GIL while it works, which the library's single-text
        call does not.

        Raises:
            InvalidRequest: a text has lone surrogates, which have no UTF-8 form.
        """
        try:
            encodings = self._inner.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeEncodeError) as error:  # which of the two depends on its release
            raise InvalidRequest("the text has lone surrogates, which are not Unicode") from error
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence, without special tokens. Ids that have no token give
        nothing."""
        return self._inner.decode(list(token_ids), skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one output."""
        if self._token_bytes is not None:
            return ByteLevelDetokenizer(self._token_bytes)
        return WindowDetokenizer(self._inner, self._special_ids)


def _token_bytes(inner: tokenizers.Tokenizer, special_ids: frozenset[int]) -> TokenBytes | None:
    """The byte table of a byte-level tokenizer, None for other kinds."""
    decoder = json.loads(inner.to_str()).get("decoder") or {}
    return TokenBytes(inner, special_ids) if decoder.get("type") == "ByteLevel" else None
