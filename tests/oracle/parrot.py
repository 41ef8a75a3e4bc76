r"""Writes a tiny Llama that says given texts: whatever reads a model's text can be tried through
the whole product.

Every text is cut into tokens of its own, and the weights make each token follow its predecessor:
attention and MLP are zero, the embedding gives each token a random vector of signs, and the output
head answers such a vector with the token that comes next. The prompt predicts nothing. A request
picks the text by a bias on its first token:

    parrot = build(folder, template, {"greeting": "Hello.", "bytes": b"\xff\xfe"})
    body = {"messages": messages, **parrot.say("greeting")}
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["Parrot", "Pieces", "build"]

BOS, EOS = "<|bos|>", "<|eos|>"
#: Wide enough that random vectors of signs are told apart by their products, in 100,000 tokens.
_HIDDEN = 512
#: The right next token scores this much; the first token of the text, by its bias, 100; by chance
#: another one scores less than 70.
_RIGHT_LOGIT = 256.0
_BIAS = 100
#: Lengths in bytes that are tried for a piece; most tokens of real models are short.
_SHORT, _LONG = range(2, 9), range(9, 40)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A text whose tokens are given. No two tokens of all texts may be the same bytes, and none may
    end the prompt. ``is_endless``: after the last token the first one follows."""

    pieces: Sequence[bytes]
    is_endless: bool = False


@dataclass(frozen=True, kw_only=True)
class Parrot:
    """A checkpoint that has been written."""

    folder: Path
    #: Token ids of each text, without the EOS that follows.
    token_ids: Mapping[str, Sequence[int]]

    def say(self, name: str) -> dict[str, Any]:
        """Fields of a request whose answer is this text."""
        return {"temperature": 0, "logit_bias": {str(self.token_ids[name][0]): _BIAS}}


def build(
    folder: Path,
    template: str,
    texts: Mapping[str, str | bytes | Pieces],
    *,
    special_tokens: Sequence[str] = (),
) -> Parrot:
    """Write the checkpoint. Texts need two bytes at least; the same call writes the same files.

    Args:
        folder: Made where it is not there.
        template: The chat template.
        texts: What it can say, by name. Bytes need not be UTF-8.
        special_tokens: Tokens that templates may name, beside BOS and EOS.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spelling = _byte_spelling()
    vocab = {spelling[byte]: byte for byte in range(256)}
    cutter = _Cutter()
    chains: dict[str, list[int]] = {}
    for name, text in texts.items():
        if isinstance(text, Pieces):
            pieces = list(text.pieces)
        else:
            pieces = cutter.cut(text if isinstance(text, bytes) else text.encode())
        spelled = ["".join(spelling[byte] for byte in piece) for piece in pieces]
        chains[name] = [vocab.setdefault(piece, len(vocab)) for piece in spelled]
    tokenizer = _tokenizer(vocab, special_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    successors: dict[int, int] = {}
    for name, chain in chains.items():
        text = texts[name]
        is_endless = isinstance(text, Pieces) and text.is_endless
        last = chain[0] if is_endless else _id_of(tokenizer, EOS)
        assert successors.keys().isdisjoint(chain), f"{name}: a token has two successors"
        successors |= zip(chain, [*chain[1:], last], strict=True)
    (folder / "chat_template.jinja").write_text(template)
    specials = {"bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(specials))
    config = _config(tokenizer)
    (folder / "config.json").write_text(json.dumps(config))
    weights = _weights(config["vocab_size"], successors)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return Parrot(folder=folder, token_ids=chains)


class _Cutter:
    """Cuts texts so that no two pieces are the same bytes: each stands at one place of one text."""

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._used: set[bytes] = set()

    def cut(self, text: bytes) -> list[bytes]:
        """The last piece is found first: it is as long as it takes to be new. A try that has no
        new piece left begins again with other lengths."""
        for tail_len in range(2, len(text) + 1):
            tail = text[len(text) - tail_len :]
            if tail in self._used or (tail_len > 2 and self._rng.random() < 0.3):
                continue
            for _ in range(100):
                pieces = self._try(text, len(text) - tail_len, {tail})
                if pieces is not None:
                    self._used |= {*pieces, tail}
                    return [*pieces, tail]
        raise ValueError(f"no cut of {text[:60]!r} into pieces that no other text has")

    def _try(self, text: bytes, end: int, mine: set[bytes]) -> list[bytes] | None:
        """New pieces for the first ``end`` bytes; None: at some place there was none."""
        pieces: list[bytes] = []
        start = 0
        while start < end:
            found = next(
                (
                    piece
                    for length in self._lengths()
                    if start + length == end or start + length < end - 1
                    if (piece := text[start : start + length]) not in self._used | mine
                ),
                None,
            )
            if found is None:
                return None
            mine.add(found)
            pieces.append(found)
            start += len(found)
        return pieces

    def _lengths(self) -> Iterator[int]:
        yield from self._rng.sample(_SHORT, len(_SHORT))
        yield from self._rng.sample(_LONG, len(_LONG))


def _byte_spelling() -> dict[int, str]:
    """The characters that stand for bytes in a byte-level vocabulary: printable Latin-1 for
    itself, U+0100 and up for the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable}
    return spelling | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def _tokenizer(vocab: Mapping[str, int], special_tokens: Sequence[str]) -> Tokenizer:
    """Prompts become single bytes: there are no merges."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocab), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = (EOS, BOS, *special_tokens)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in added])
    return tokenizer


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }


def _weights(vocab_size: int, successors: Mapping[int, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    embedding = torch.zeros(vocab_size, _HIDDEN)
    head = torch.zeros(vocab_size, _HIDDEN)
    before, after = torch.tensor(list(successors)), torch.tensor(list(successors.values()))
    signs = torch.randint(0, 2, (len(successors), _HIDDEN), generator=generator) * 2.0 - 1.0
    embedding[before] = signs
    head.index_add_(0, after, signs * (_RIGHT_LOGIT / _HIDDEN))
    layer = "model.layers.0."
    shapes = {
        "self_attn.q_proj": (64, _HIDDEN),
        "self_attn.k_proj": (64, _HIDDEN),
        "self_attn.v_proj": (64, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, 64),
        "mlp.gate_proj": (64, _HIDDEN),
        "mlp.up_proj": (64, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, 64),
    }
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": head,
        **{f"{layer}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()},
        f"{layer}input_layernorm.weight": torch.ones(_HIDDEN),
        f"{layer}post_attention_layernorm.weight": torch.ones(_HIDDEN),
    }
