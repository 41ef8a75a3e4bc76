"""What the tools' JSON schemas say about arguments that a model writes as texts without quotes.

A text can be read as a literal (JSON's, or one of Python's, which models write as well) and as a
string. The first reading that the schema accepts is taken: literals before strings, so that ``5``
is a number wherever it may be one. So ``["string", "null"]`` makes ``null`` of ``null``, and the
string ``"123"`` of ``123``. Where the schema accepts neither, a literal stays one if the schema
wants no string. Where it says nothing, a text is a string, byte for byte.

Only the value itself is looked at, not what is in it: inside, it is JSON, and typed.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

from pdx.text.calls.json_text import proper_json, with_proper_escapes

__all__ = ["FunctionSchema", "ToolSchemas"]

Schema: TypeAlias = Any

#: Schemas that refer to each other can have no end; no honest one has so many parts, or so deep
#: ones.
_MAX_STEPS = 1000
_MAX_DEPTH = 64
#: Python's parser is slow and deep; longer values are JSON or strings.
_MAX_PYTHON_CHARS = 65536
_NAMES = {
    **dict.fromkeys(("True", "TRUE"), "true"),
    **dict.fromkeys(("False", "FALSE"), "false"),
    **dict.fromkeys(("None", "Null", "NULL"), "null"),
}
#: Numbers that JSON writes in another way: ``+5``, ``007``, ``.5``, ``5.``
_NUMBER = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?((?:[eE][+-]?\d+)?)", re.ASCII)
#: Names for types that JSON schema does not have and tools are described with, in small letters.
_TYPE_OF_NAME = {
    **dict.fromkeys(("str", "text", "char", "varchar", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "long", "short"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    **dict.fromkeys(("bool",), "boolean"),
    **dict.fromkeys(("list", "tuple", "set"), "array"),
    **dict.fromkeys(("dict", "map", "mapping"), "object"),
    **dict.fromkeys(("none", "nonetype"), "null"),
}
#: Keywords that only one type has, where the type is left out.
_TYPE_OF_KEYWORD = {
    "properties": "object",
    "additionalProperties": "object",
    "patternProperties": "object",
    "propertyNames": "object",
    "required": "object",
    "minProperties": "object",
    "maxProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "contains": "array",
    "minItems": "array",
    "maxItems": "array",
    "uniqueItems": "array",
    "minLength": "string",
    "maxLength": "string",
    "pattern": "string",
    "format": "string",
    "minimum": "number",
    "maximum": "number",
    "exclusiveMinimum": "number",
    "exclusiveMaximum": "number",
    "multipleOf": "number",
}
_COMBINATIONS = ("anyOf", "oneOf", "allOf")


class ToolSchemas:
    """Schemas of the tools that the model was shown; a client may send anything as a schema."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._parameters = {each["name"]: each.get("parameters") for each in functions}

    @property
    def names(self) -> frozenset[str]:
        """The functions' names."""
        return frozenset(self._parameters)

    def of(self, name: str) -> FunctionSchema:
        """One function's; that of an unknown one says nothing."""
        return FunctionSchema(self._parameters.get(name))


class FunctionSchema:
    """The schema of one function's parameters."""

    def __init__(self, parameters: Schema) -> None:
        self._checks = _Checks(parameters)
        self._properties: dict[str, list[Schema]] = {}
        for name, schema in self._checks.properties():
            self._properties.setdefault(name, []).append(schema)
        rest = parameters.get("additionalProperties") if isinstance(parameters, Mapping) else None
        self._rest = rest if isinstance(rest, Mapping) else {}
        #: The parameters that it names.
        self.names = frozenset(self._properties)
        #: There may be other ones.
        self.allows_others = rest is not False or not self.names

    def typed(self, key: str, text: str) -> str:
        """JSON of what the text of a parameter means."""
        found = self._properties.get(key, [self._rest])
        return self._checks.typed(text, found[0] if len(found) == 1 else {"anyOf": found})


class _Checks:
    """Checks of values, by schemas that may refer to parts of ``root``."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_steps = 0

    def properties(self) -> Iterator[tuple[str, Schema]]:
        """Name and schema of each property that an object may have."""
        self._num_steps = 0
        yield from self._properties_of(self._root, 0)

    def typed(self, text: str, schema: Schema) -> str:
        """JSON of the first reading of a text that the schema accepts."""
        raw = json.dumps(text, ensure_ascii=False)
        if _says_nothing(self._target(schema)):
            return raw
        literals = list(_literals(text))
        readings = [literal for literal in literals if not isinstance(literal[0], str)]
        readings.append((text, raw))
        readings += [literal for literal in literals if isinstance(literal[0], str)]
        readings += _odd_number(text.strip())
        for value, written in readings:
            if self._is_accepted(schema, value):
                return written
        wants_string = self._is_accepted(schema, "", by_type=True)
        return raw if wants_string else readings[0][1]

    def _is_accepted(self, schema: Schema, value: Any, *, by_type: bool = False) -> bool:
        self._num_steps = 0
        return self._accepts(schema, value, by_type, 0)

    def _accepts(self, schema: Schema, value: Any, by_type: bool, depth: int) -> bool:
        """``by_type``: any value of the same type would do."""
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS or depth > _MAX_DEPTH:
            return False
        if not isinstance(schema, Mapping):
            return schema is not False
        if value is None and schema.get("nullable") is True:
            return True

        def accepts(part: Schema) -> bool:
            return self._accepts(part, value, by_type, depth + 1)

        ref = schema.get("$ref")
        if isinstance(ref, str) and not accepts(self._find(ref)):
            return False
        if not _own_keywords_accept(schema, value, by_type):
            return False
        for keyword in ("anyOf", "oneOf"):
            parts = schema.get(keyword)
            if isinstance(parts, list) and parts and not any(map(accepts, parts)):
                return False
        parts = schema.get("allOf")
        return not isinstance(parts, list) or all(map(accepts, parts))

    def _properties_of(self, schema: Schema, depth: int) -> Iterator[tuple[str, Schema]]:
        self._num_steps += 1
        is_too_much = self._num_steps > _MAX_STEPS or depth > _MAX_DEPTH
        if not isinstance(schema, Mapping) or is_too_much:
            return
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            yield from properties.items()
        ref = schema.get("$ref")
        if isinstance(ref, str):
            yield from self._properties_of(self._find(ref), depth + 1)
        for keyword in _COMBINATIONS:
            parts = schema.get(keyword)
            for part in parts if isinstance(parts, list) else ():
                yield from self._properties_of(part, depth + 1)

    def _target(self, schema: Schema) -> Schema:
        """What a schema refers to that has nothing else to say."""
        path: set[str] = set()
        while isinstance(schema, Mapping) and _says_nothing({**schema, "$ref": None}):
            ref = schema.get("$ref")
            if not isinstance(ref, str) or ref in path:
                break
            path.add(ref)
            schema = self._find(ref)
        return schema

    def _find(self, ref: str) -> Schema:
        """What a reference points to; a schema that says nothing where that is not in the root."""
        if not ref.startswith("#"):
            return {}
        found: Any = self._root
        for token in unquote(ref[1:]).split("/")[1:]:
            step = token.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(step)
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                return {}
        return {} if found is None else found


def _says_nothing(schema: Schema) -> bool:
    """No keyword of it says anything about a value's type."""
    if not isinstance(schema, Mapping):
        return True
    telling = ("type", "enum", "const", "$ref", "nullable", *_COMBINATIONS, *_TYPE_OF_KEYWORD)
    return all(schema.get(keyword) is None for keyword in telling) and "const" not in schema


def _own_keywords_accept(schema: Mapping[str, Any], value: Any, by_type: bool) -> bool:
    """What a schema says itself, not by reference or by a combination of others."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and not any(_is_of_type(value, each) for each in kinds):
        return False
    if "enum" in schema and isinstance(schema["enum"], list):
        return any(_is_same(value, each, by_type) for each in schema["enum"])
    if "const" in schema:
        return _is_same(value, schema["const"], by_type)
    excluded = schema.get("not")
    can_exclude = isinstance(excluded, Mapping) and excluded.keys() <= {"type", "enum", "const"}
    if can_exclude and excluded and _own_keywords_accept(excluded, value, by_type):
        return False
    if kind is None and "$ref" not in schema and schema.keys().isdisjoint(_COMBINATIONS):
        implied = {_TYPE_OF_KEYWORD[key] for key in schema if key in _TYPE_OF_KEYWORD}
        return not implied or any(_is_of_type(value, each) for each in implied)
    return True


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _is_of_type(value: Any, name: object) -> bool:
    kind = _kind(value)
    if isinstance(name, str):
        name = _TYPE_OF_NAME.get(name.lower(), name.lower())
    if name in ("null", "boolean", "integer", "string", "array", "object"):
        return kind == name
    if name == "number":
        return kind in ("integer", "number")
    return True  # a type that JSON schema does not have


def _is_same(value: Any, other: Any, by_type: bool) -> bool:
    """Python takes true for 1."""
    if isinstance(value, bool) or isinstance(other, bool) or by_type:
        return type(value) is type(other) and (by_type or value == other)
    return bool(value == other)


def _literals(text: str) -> Iterator[tuple[Any, str]]:
    """A text as JSON, and that JSON as it is written to the client."""
    found = _json_literal(text.strip()) or _python_literal(text.strip())
    if found is None:
        return
    yield found
    value, _ = found
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        yield int(value), str(int(value))
    if isinstance(value, str):
        inner = _json_literal(value.strip())
        if inner is not None and not isinstance(inner[0], str):
            yield inner


def _json_literal(text: str) -> tuple[Any, str] | None:
    text = with_proper_escapes(_NAMES.get(text, text))
    try:
        return json.loads(text, strict=False), proper_json(text)
    except (ValueError, RecursionError):
        return None


def _odd_number(text: str) -> Iterator[tuple[Any, str]]:
    """A number that is written as JSON does not write it."""
    found = _NUMBER.fullmatch(text)
    if found is None or not (found[2] or found[3]):
        return
    sign, whole, fraction, exponent = found.groups()
    written = sign.removeprefix("+") + (whole.lstrip("0") or "0")
    written += (f".{fraction}" if fraction else "") + exponent
    value = _json_literal(written)
    if value is not None:
        yield value


def _python_literal(text: str) -> tuple[Any, str] | None:
    """A list or a dict as Python writes it."""
    if not text.startswith(("[", "{", "(")) or len(text) > _MAX_PYTHON_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes
            written = json.dumps(ast.literal_eval(text), allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return json.loads(written), written
