"""One JSON object of a model folder, read field by field. No torch; any process.

Each field is taken once. What nobody took is looked at in the end: a field that we do not know may
change what the model computes, so it is refused by name, unless it is null or known to change
nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdx.errors import CheckpointError

__all__ = ["MAX_SIZE", "Fields", "read_json", "shortened"]

#: The largest size that is accepted. No dimension of a model comes near it.
MAX_SIZE = (1 << 31) - 1


class Fields:
    """The fields that are left of an object."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._rest = dict(values)

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The field's value; null counts as absent, as transformers has it."""
        value = self._rest.pop(name, None)
        if value is None:
            if default is ...:
                raise CheckpointError(f"{self.path}: field {name!r} is missing")
            return default
        # bool is an int in Python and never meant as one here.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            wanted = " or ".join(_JSON_KINDS.get(each, each.__name__) for each in kinds)
            raise self.refused(name, value, f"{wanted} is wanted")
        return value

    def peek(self, name: str) -> Any:
        """The value as it stands, which stays to be taken; None where it is absent."""
        return self._rest.get(name)

    def size(self, name: str, default: Any = ..., *, most: int = MAX_SIZE) -> int:
        """A positive integer of at most ``most``."""
        value: int = self.take(name, int, default)
        if value <= 0:
            raise self.refused(name, value, "a positive integer is wanted")
        if value > most:
            raise self.refused(name, value, f"at most {most:,} is served")
        return value

    def number(self, name: str, default: Any = ..., *, may_be_zero: bool = False) -> float:
        """A positive, finite number."""
        given = self.take(name, (int, float), default)
        wanted = "a number of 0 or more" if may_be_zero else "a positive number"
        try:
            value = float(given)
        except OverflowError:  # an integer of hundreds of digits
            raise self.refused(name, given, f"{wanted} of float64 is wanted") from None
        if not (0 < value < math.inf or (may_be_zero and value == 0)):
            raise self.refused(name, value, f"{wanted} is wanted")
        return value

    def require(self, name: str, *served: Any) -> None:
        """Refuse the field unless it is absent, null or one of ``served``."""
        value = self._rest.pop(name, None)
        if value is not None and not any(type(value) is type(s) and value == s for s in served):
            wanted = " or ".join(map(json.dumps, served))
            raise self.refused(name, value, f"served is {wanted}" if len(wanted) < 80 else "")

    def demand(self, *names: str) -> None:
        """Refuse an object that lacks one of the fields; they stay to be taken."""
        missing = [repr(name) for name in names if self._rest.get(name) is None]
        if missing:
            what = "fields {} are" if len(missing) > 1 else "field {} is"
            raise CheckpointError(f"{self.path}: {what.format(', '.join(missing))} missing")

    def stated(self, name: str) -> bool:
        """Whether the field has a value; null is one where its absence means something else.

        Raises:
            CheckpointError: the field is absent.
        """
        if name not in self._rest:
            raise CheckpointError(f"{self.path}: field {name!r} is missing")
        return self._rest[name] is not None

    def drop(self, *names: str) -> None:
        """Take fields that say nothing, given what has been read before."""
        for name in names:
            self._rest.pop(name, None)

    def refused(self, name: str, value: Any, why: str = "") -> CheckpointError:
        """The error for a value that is not served, with what is wanted in its place."""
        reason = f": {why}" if why else ""
        shown = shortened(json.dumps(value))
        return CheckpointError(f"{self.path}: {name} = {shown} is not served{reason}")

    def refuse_rest(self) -> None:
        """Refuse fields that nobody took, unless they are null or known to change nothing."""
        unknown = {
            name: value
            for name, value in self._rest.items()
            if value is not None and name not in _IGNORED and not name.startswith("_")
        }
        if unknown:
            listed = ", ".join(
                f"{name} = {shortened(json.dumps(value))}" for name, value in unknown.items()
            )
            raise CheckpointError(
                f"{self.path}: unknown fields: {listed}",
                hint="they may change the computation, so the model is not served",
            )


#: Characters of a value in a message.
_MAX_SHOWN = 200
#: Fields in a message.
_MAX_LISTED = 8
_JSON_KINDS: dict[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
#: Fields that do not change what the model computes: bookkeeping, training, defaults of generation
#: and of the API.
_IGNORED = frozenset(
    {
        "attention_dropout",
        "auto_map",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "do_sample",
        "early_stopping",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "name_or_path",
        "no_repeat_ngram_size",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "task_specific_params",
        "temperature",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)


def shortened(text: str) -> str:
    """A value as an error shows it: a file may hold one of any length."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text):,} characters)"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        CheckpointError: the file is missing or damaged, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist", hint="a model folder in Hugging Face layout is wanted"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value
