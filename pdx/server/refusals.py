"""What is said of a body that is refused: the field, what it may be, and what it is. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pdx.errors import InvalidRequest

__all__ = ["SHOWN_CHARS", "no_json", "shown", "wrong_value"]

SHOWN_CHARS = 80
#: Longer bodies that cannot be decoded are not read again only to say what is wrong with them.
_MAX_EXPLAINED_BYTES = 1 << 20
_MAX_DIGITS = 1000


def shown(value: object) -> str:
    """The value as the client wrote it, cut to a readable length."""
    if isinstance(value, str):
        value = value[: SHOWN_CHARS + 1]
    elif isinstance(value, list | dict) and len(value) > SHOWN_CHARS:
        return "a long list" if isinstance(value, list) else "a large object"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def wrong_value(error: ValidationError, body: Any) -> InvalidRequest:
    """The refusal of the first wrong field of a body."""
    first, others = _most_telling(error.errors(include_url=False))
    path = _path(first, body)
    where = _dotted(path)
    allowed = [first["msg"], *(other.removeprefix("Input should be ") for other in others)]
    message = ", or ".join(allowed).replace("dictionary", "object")
    message = message.partition(" or instance of ")[0]  # a name of ours
    message = f"{where or 'the body'}: {message}"
    if first["type"] != "missing":
        message += f", got {_shown_or_kind(first['input'])}"
    return InvalidRequest(message, param=_param(path))


def _most_telling(errors: Sequence[ErrorDetails]) -> tuple[ErrorDetails, list[str]]:
    """The most telling error of the first wrong field, and the other types that it may have.

    Where it may have several types, each complains: what is said of a value tells more than what is
    said of its type, and so does what is deeper.
    """
    field = errors[0]["loc"][:1]
    of_field = [error for error in errors if error["loc"][:1] == field]
    first = max(of_field, key=lambda e: (not e["type"].endswith("_type"), len(e["loc"])))
    if not first["type"].endswith("_type"):
        return first, []
    same_value = [e["msg"] for e in of_field if e is not first and e["input"] is first["input"]]
    return first, list(dict.fromkeys(msg for msg in same_value if msg != first["msg"]))


def _path(error: ErrorDetails, body: Any) -> list[str | int]:
    """The place in the body. Among the parts of pydantic's own there are names of types, which are
    no part of what the client sent."""
    path: list[str | int] = []
    value = body
    for part in error["loc"]:
        try:
            value = value[part]
        except (LookupError, TypeError):
            continue
        path.append(part)
    return [*path, error["loc"][-1]] if error["type"] == "missing" else path


def _shown_or_kind(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else shown(value)


def no_json(raw: bytes, error: Exception) -> InvalidRequest:
    """The refusal of a body that cannot be decoded."""
    if not raw.strip():
        return InvalidRequest("the body is empty; it must be a JSON object")
    if isinstance(error, RecursionError):
        return InvalidRequest("the body's lists and objects are nested too deeply")
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        return InvalidRequest(f"the body is not UTF-8, from byte {wrong.start} on")
    odd = _odd_value(raw) if len(raw) <= _MAX_EXPLAINED_BYTES else None
    if odd is None:
        return InvalidRequest(f"the body is no JSON: {error}")
    path, what = odd
    return InvalidRequest(f"{_dotted(path) or 'the body'}: {what}", param=_param(path))


def _odd_value(raw: bytes) -> tuple[list[str | int], str] | None:
    """The place of a value that Python's reader takes and that is no JSON or no Unicode."""
    try:
        body = json.loads(raw, parse_int=_bounded_int)
    except (ValueError, RecursionError):
        return None
    for path, value in _walk(body):
        if isinstance(value, float) and not math.isfinite(value):
            return path, "a number must be finite, and not as long as this one"
        if isinstance(value, str) and not _is_unicode(value):
            return path, "the text has half of a surrogate pair (\\ud800 to \\udfff), no character"
    return None


def _bounded_int(digits: str) -> int | float:
    """Python refuses thousands of digits, without saying where."""
    return int(digits) if len(digits) < _MAX_DIGITS else math.inf


def _walk(body: Any) -> Iterator[tuple[list[str | int], Any]]:
    """Each value with its path; an object's keys are values under the object's path."""
    waiting: list[tuple[list[str | int], Any]] = [([], body)]
    while waiting:
        path, value = waiting.pop()
        yield path, value
        if isinstance(value, dict):
            waiting += ((path, key) for key in value)
            waiting += (([*path, key], each) for key, each in value.items())
        elif isinstance(value, list):
            waiting += (([*path, idx], each) for idx, each in enumerate(value))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dotted(path: Sequence[str | int]) -> str:
    text = ".".join(str(part)[:SHOWN_CHARS] for part in path)
    return text if _is_unicode(text) else text.encode(errors="replace").decode()


def _param(path: Sequence[str | int]) -> str | None:
    return _dotted(path[:1]) or None
