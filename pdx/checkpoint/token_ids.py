"""Which of a model's ids stand for no token. No torch; pure but for reading one file.

A vocabulary is padded to a round number (Qwen3: 151,936 rows for 151,669 tokens). The rows above
the last token were never trained, and no text comes of their ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pdx.errors import CheckpointError

__all__ = ["ids_without_token"]


class _AddedToken(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    #: Ids by token; a unigram model's is a list, in which a token's place is its id.
    vocab: dict[str, int] | list[Any]


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


def ids_without_token(folder: Path, vocab_size: int) -> list[int]:
    """Ids below ``vocab_size`` that ``tokenizer.json`` does not know, ascending; none where the
    folder has no such file.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return []
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    vocab = file.model.vocab
    known = set(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
    known.update(token.id for token in file.added_tokens)
    return [token_id for token_id in range(vocab_size) if token_id not in known]
