"""The text, the tokenizer and the chat template of the tiny checkpoints."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

__all__ = [
    "BOS",
    "CHAT_TEMPLATE",
    "EOT",
    "PAD",
    "TEXT",
    "TURN_END",
    "VOCAB_SIZE",
    "build_tokenizer",
]

VOCAB_SIZE = 512
BOS, EOT, TURN_START, TURN_END, PAD = (
    "<|bos|>",
    "<|eot|>",
    "<|turn|>",
    "<|end|>",
    "<|pad|>",
)
_SPECIALS = [BOS, EOT, TURN_START, TURN_END, PAD]
TEXT = """A lighthouse keeper wrote down every ship that passed, the hour, the wind and the colour
of the water. In winter there were days without a single line, and he wrote that down as well. When
the new keeper came she read all forty books and asked only one question: why had nobody ever noted
the ships that turned back? Since then there is a second column. Numbers make poor company, she
says, but 3 ships and 17 gulls are better than none. The lamp burns from dusk to dawn; it needs oil,
a clean glass and somebody who is awake. def light(hours: int) -> list[str]: return ["on"] * hours
# nothing else. {"name": "keeper", "awake": true, "oil": [12, 11, 9]} And the fog: it comes in from
the north-west, slowly, then all at once, and the bell is rung twice a minute until it lifts
again."""
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def build_tokenizer(*, puts_bos: bool) -> Tokenizer:
    """Byte-level BPE with exactly VOCAB_SIZE ids. Llama's post-processor puts BOS first, Qwen's
    does not.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_SPECIALS), show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIALS])
    if puts_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer
