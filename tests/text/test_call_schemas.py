"""What a text without quotes means, by the schema of its parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.text.calls.schemas import FunctionSchema

DEFS = {
    "Point": {"type": "object", "properties": {"x": {"type": "number"}}},
    "Maybe": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
    "Alias": {"$ref": "#/$defs/Count"},
    "Count": {"type": "integer"},
    "Anything": {},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Tree": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Tree"}, {"type": "integer"}]},
    "Wide": {"anyOf": [{"$ref": "#/$defs/Wide2"}] * 50},
    "Wide2": {"anyOf": [{"$ref": "#/$defs/Wide3"}] * 50},
    "Wide3": {"anyOf": [{"type": "string"}] * 50},
    "a/b~c d": {"type": "boolean"},
}


def typed(text: str, schema: Any) -> str:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": DEFS}
    return FunctionSchema(parameters).typed("a", text)


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


INT_OR_NULL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        ({"type": "string"}, "5", '"5"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, ' "quoted" ', '" \\"quoted\\" "'),
        ({"type": "integer"}, "5", "5"),
        ({"type": "integer"}, " 5\n", "5"),
        ({"type": "integer"}, "1.0", "1"),
        ({"type": "integer"}, '"5"', "5"),
        ({"type": "integer"}, "five", '"five"'),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "1.0", "1.0"),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "+.5", "0.5"),
        ({"type": "number"}, "-5.", "-5"),
        ({"type": "number"}, ".", '"."'),
        ({"type": "integer"}, "007", "7"),
        ({"type": "integer"}, "-000", "-0"),
        ({"type": "integer"}, "0" * 100_000 + "x", f'"{"0" * 100_000}x"'),
        ({"type": ["integer", "string"]}, "007", '"007"'),
        ({"type": ["integer", "null"]}, "NULL", "null"),
        ({"type": "STRING"}, "5", '"5"'),
        ({"type": "str"}, "null", '"null"'),
        ({"anyOf": [{"type": "Bool"}, {"type": "text"}]}, "True", "true"),
        ({"anyOf": [{"type": "Bool"}, {"type": "text"}]}, "7", '"7"'),
        ({"type": ["INT", "float"]}, "5.5", "5.5"),
        ({"type": "array"}, '["\\d+", "C:\\x"]', '["\\\\d+", "C:\\\\x"]'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "false", "false"),
        ({"type": "null"}, "None", "null"),
        ({"type": "array"}, "[1, 'a', None, True]", '[1, "a", null, true]'),
        ({"type": "array"}, "[1", '"[1"'),
        ({"type": "array"}, '[1,"\\ud800"]', '[1,"\\ud800"]'),
        ({"type": "array"}, "['\\ud800']", '["\\ud800"]'),
        ({"type": "object"}, '{"x":  1.50}', '{"x":  1.50}'),
        ({"type": "object"}, "{'x': {1, 2}}", "\"{'x': {1, 2}}\""),
        ({"type": ["string", "null"]}, "123", '"123"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "[1]", '"[1]"'),
        ({"type": ["integer", "string"]}, "5", "5"),
        ({"type": ["integer", "string"]}, "5 apples", '"5 apples"'),
        ({"type": ["boolean", "string"]}, "5", '"5"'),
        (INT_OR_NULL, "5", "5"),
        (INT_OR_NULL, "null", "null"),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1]", "[1]"),
        ({"oneOf": [{"type": "string"}, {"type": "object"}]}, "{}", "{}"),
        ({"oneOf": [{"type": "string"}, {"type": "object"}]}, "[]", '"[]"'),
        ({"allOf": [INT_OR_NULL, {"type": ["integer", "string"]}]}, "7", "7"),
        ({"allOf": [INT_OR_NULL, {"type": ["integer", "string"]}]}, "x", '"x"'),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "7", '"7"'),
        ({"type": "integer", "nullable": True}, "null", "null"),
        ({"type": "string", "nullable": True}, "null", "null"),
        ({"type": "string", "nullable": True}, "7", '"7"'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "1", "1"),
        ({"enum": [True, "a"]}, "1", '"1"'),
        ({"enum": ["a"]}, '"a"', '"a"'),
        ({"type": "string", "enum": ["a"]}, "5", '"5"'),
        ({"const": 1}, "1", "1"),
        ({"const": "1"}, "1", '"1"'),
        ({"const": None}, "null", "null"),
        ({"properties": {}}, "{}", "{}"),
        ({"items": {"type": "string"}}, "[1]", "[1]"),
        ({"minLength": 1}, "5", '"5"'),
        ({"minimum": 1}, "5", "5"),
        ({"not": {"type": "null"}, "type": ["null", "string"]}, "null", '"null"'),
        (ref("Point"), '{"x": 1}', '{"x": 1}'),
        (ref("Maybe"), "null", "null"),
        (ref("Maybe"), "{}", "{}"),
        (ref("Alias"), "5", "5"),
        (ref("Anything"), "5", '"5"'),
        (ref("Missing"), "5", '"5"'),
        ({"$ref": "https://example.com/x"}, "5", '"5"'),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, "true", "true"),
        (ref("Loop"), "5", "5"),
        (ref("Tree"), "5", "5"),
        (ref("Tree"), "null", "null"),
        (ref("Tree"), "x", '"x"'),
        (ref("Wide"), "x", '"x"'),
        ({"$ref": "#/properties/a"}, "x", '"x"'),
        (nested(20), "5", "5"),
        (nested(5000), "5", "5"),
        ({}, "5", '"5"'),
        (True, "5", '"5"'),
        (False, "5", '"5"'),
        ({"description": "any"}, "[1]", '"[1]"'),
        ({"type": "dict"}, "[1]", "[1]"),
        ({"type": 5}, "[1]", "[1]"),
        ({"anyOf": 5}, "[1]", "[1]"),
    ],
)
def test_a_text_becomes_what_its_schema_wants(schema: Any, text: str, wanted: str) -> None:
    assert typed(text, schema) == wanted


def test_parameters_are_found_wherever_the_schema_names_them() -> None:
    parameters = {
        "$ref": "#/$defs/Args",
        "allOf": [{"properties": {"b": {"type": "integer"}}}],
        "additionalProperties": {"type": "boolean"},
        "$defs": {"Args": {"properties": {"a": {"type": "integer"}}}},
    }
    schema = FunctionSchema(parameters)
    assert schema.names == {"a", "b"}
    assert [schema.typed(key, "1") for key in "ab"] == ["1", "1"]
    assert schema.typed("c", "true") == "true"
    assert schema.allows_others
    assert not FunctionSchema(
        {"properties": {"a": {}}, "additionalProperties": False}
    ).allows_others


schemas = st.recursive(
    st.sampled_from(["string", "integer", "null", "object", "array", "x"]).map(
        lambda t: {"type": t}
    )
    | st.booleans()
    | st.none()
    | st.sampled_from(["#", "#/properties/a", "#/$defs/Tree", "#/x", "x"]).map(
        lambda r: {"$ref": r}
    )
    | st.lists(st.sampled_from([1, "1", None, True]), max_size=2).map(lambda e: {"enum": e}),
    lambda inner: st.dictionaries(
        st.sampled_from(["anyOf", "oneOf", "allOf", "not", "properties", "items", "nullable"]),
        inner | st.lists(inner, max_size=3),
        max_size=2,
    ),
    max_leaves=6,
)


@given(
    schema=schemas, text=st.sampled_from(["1", "null", "[1]", "{}", "a", '"a"', "", "True", "'"])
)
def test_any_schema_makes_json(schema: Any, text: str) -> None:
    value = json.loads(typed(text, schema))
    assert value == text or not isinstance(value, str) or json.loads(text) == value


@given(text=st.text())
def test_strings_are_kept_byte_for_byte(text: str) -> None:
    assert json.loads(typed(text, {"type": "string"})) == text
    assert json.loads(typed(text, {})) == text
