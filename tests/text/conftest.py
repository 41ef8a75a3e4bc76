"""Small real tokenizers: byte-level BPE (as SmolLM2, Llama 3, Qwen, DeepSeek) and byte-fallback BPE
(as Llama 2), trained here, and one for each other kind of decoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from pdx.text.tokenizer import Tokenizer

CORPUS = [
    "The capital of France is Paris. Numbers: 12345 67.89",
    "def f(x):\n    return x  # comment\t\ttabs",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "Emoji 🙂🎉👩‍👩‍👧‍👦 café naïve e\u0301",
    "العربية हिन्दी ไทย",
] * 4


def byte_level(vocab_size: int = 480) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    # Not special, as Qwen's <think>; the second has characters outside the byte alphabet.
    inner.add_tokens(["<think>", "two words 語"])
    return inner


def byte_fallback() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    inner.train_from_iterator([text.replace(" ", "▁") for text in CORPUS[:2]], trainer)
    # The trainer marks all of them as special; in Llama's file the byte tokens are ordinary ones.
    parsed = json.loads(inner.to_str())
    parsed["added_tokens"] = [t for t in parsed["added_tokens"] if t["id"] < 3]
    inner = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return inner


#: Tokens of the tokenizers of other kinds, each with what its kind says of words.
_PLAIN = [
    "<unk>",
    "<s>",
    "</s>",
    "",
    "a",
    "b",
    ".",
    "'",
    "é",
    "日",
    "🙂",
    "e\u0301",
    "\u200d",
    "\ufffd",
]
_SPACED = ["▁", "▁▁", "▁a", "▁▁b", "a▁", "▁."]
_PARTS = ["##", "##a", "##é", "##.", "##\u0301", "'", "do", "n't"]
_ENDED = ["</w>", "a</w>", "é</w>", "日</w>", ".</w>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def of_decoder(kind: str) -> tokenizers.Tokenizer:
    """A vocabulary of hand-picked tokens with the decoder of a kind."""
    space = decoders.Replace("▁", " ")
    more, decoder = {
        "metaspace": (_SPACED, decoders.Metaspace()),
        "metaspace, never in front": (_SPACED, decoders.Metaspace(prepend_scheme="never")),
        "word pieces": (_PARTS, decoders.WordPiece()),
        "word pieces, not cleaned": (_PARTS, decoders.WordPiece(cleanup=False)),
        "ends of words": (_ENDED, decoders.BPEDecoder()),
        "no decoder": (_PARTS, None),
        "byte fallback, nothing stripped": (
            _SPACED + _BYTES,
            decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse()]),
        ),
        "byte fallback, stripped": (
            _SPACED + _BYTES,
            decoders.Sequence(
                [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            ),
        ),
    }[kind]
    tokens = dict.fromkeys([*_PLAIN, *more])
    vocab = {token: idx for idx, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if decoder is not None:
        inner.decoder = decoder
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner


OTHER_KINDS = (
    "metaspace",
    "metaspace, never in front",
    "word pieces",
    "word pieces, not cleaned",
    "ends of words",
    "no decoder",
    "byte fallback, nothing stripped",
    "byte fallback, stripped",
)


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    inner = {"byte_level": byte_level, "byte_fallback": byte_fallback}[request.param]()
    folder: Path = tmp_path_factory.mktemp(request.param)
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)
