"""Bodies that nobody means well with: each gets an answer, and a wrong one is named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdx.server.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pdx.server.fields import NEUTRAL_FIELDS

if TYPE_CHECKING:
    from conftest import Frontend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
OK: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 1},
    CHAT: USER,
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
}
KINDS = {
    COMPLETIONS: CompletionBody,
    CHAT: ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
HALF = "a\ud800b"


def nested(depth: int) -> Any:
    value: Any = "x"
    for idx in range(depth):
        value = {"a": value} if idx % 2 else [value]
    return value


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (COMPLETIONS, {"prompt": HALF}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", HALF]}, "prompt.1"),
        (COMPLETIONS, {"prompt": "Hi", "stop": ["x", HALF]}, "stop.1"),
        (COMPLETIONS, {"prompt": "Hi", "model": HALF}, "model"),
        (COMPLETIONS, {"prompt": "Hi", "user": HALF}, "user"),
        (COMPLETIONS, {"prompt": "Hi", "logit_bias": {HALF: 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "Hi", "metadata": {"a": [HALF]}}, "metadata.a.0"),
        (CHAT, {"messages": [{"role": "user", "content": HALF}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": HALF, "content": "x"}]}, "messages.0.role"),
        (
            CHAT,
            USER | {"tools": [{"type": "function", "function": {"name": HALF}}]},
            "tools.0.function.name",
        ),
        (CHAT, USER | {"chat_template_kwargs": {"x": HALF}}, "chat_template_kwargs.x"),
        ("/tokenize", {"prompt": HALF}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": HALF}]}, "messages.0.content"),
    ],
)
def test_half_of_a_character_is_named_with_its_place(
    frontend: Frontend, http: httpx.Client, path: str, body: dict[str, Any], place: str
) -> None:
    error = refusal(http.post(path, content=json.dumps(body)))
    assert error["param"] == place.partition(".")[0]
    assert error["message"].startswith(f"{place}: ")
    assert "surrogate" in error["message"]
    assert frontend.messages.empty()


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 4000 + ".5e9"])
def test_number_that_is_none_is_named_with_its_place(
    frontend: Frontend, http: httpx.Client, literal: str
) -> None:
    for field in ("temperature", "seed", "max_tokens"):
        error = refusal(http.post(COMPLETIONS, content=f'{{"prompt": "x", "{field}": {literal}}}'))
        assert error["param"] == field
    assert frontend.messages.empty()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "the body is empty"),
        (b"  \n", "the body is empty"),
        (b"[1]", "the body: Input should be a valid object, got a list"),
        (b"null", "the body: Input should be a valid object, got null"),
        (b'{"prompt": "\xff"}', "not UTF-8, from byte 12 on"),
        (b'{"prompt": "x",}', "no JSON"),
        (b"\xef\xbb\xbf{}", "no JSON"),
        (b"[" * 5000, "nested too deeply"),
        (b'{"a":' * 5000, "nested too deeply"),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "prompt must be"),
        (b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", "seed"),
        (b'{"prompt": "x", "' + b"a" * 100_000 + b'": 1}', "unknown field"),
    ],
)
def test_body_that_is_none_gets_a_reason(
    frontend: Frontend, http: httpx.Client, raw: bytes, words: str
) -> None:
    message = refusal(http.post(COMPLETIONS, content=raw))["message"]
    assert words in message
    assert len(message) < 1000


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "application/x", ""])
def test_the_content_type_is_not_asked_for(
    talking: Frontend, http: httpx.Client, kind: str
) -> None:
    """curl -d says that it sends a form."""
    body = json.dumps(OK[COMPLETIONS])
    response = http.post(COMPLETIONS, content=body, headers={"content-type": kind})
    assert response.status_code == 200


def test_of_a_key_that_comes_twice_the_last_counts(talking: Frontend, http: httpx.Client) -> None:
    raw = '{"prompt": "Hi", "max_tokens": 1, "max_tokens": 3}'
    assert http.post(COMPLETIONS, content=raw).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("key", ["05", "00", "+5", "-0", " 5", "5 ", "5.0", "５", "1_0", "0x5", ""])
def test_logit_bias_is_keyed_by_ids_in_one_spelling(
    frontend: Frontend, http: httpx.Client, key: str
) -> None:
    """Two keys for one token would leave open which counts."""
    error = refusal(http.post(COMPLETIONS, json=OK[COMPLETIONS] | {"logit_bias": {"5": 1, key: 2}}))
    assert error["param"] == "logit_bias"
    assert repr(key) in error["message"]


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        [
            0,
            -1,
            1,
            2**31,
            2**63,
            2**64,
            -(2**63) - 1,
            10**400,
            1e308,
            5e-324,
            "",
            "\0",
            HALF,
            "user",
        ]
    )
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=12,
) | st.integers(1, 950).map(nested)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "refusal"]),
        SCALARS | VALUES | st.just("assistant"),
        max_size=4,
    ).map(lambda message: {"role": "user"} | message),
    max_size=3,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function")},
        optional={
            "function": st.fixed_dictionaries(
                {"name": st.just("f") | SCALARS}, optional={"parameters": VALUES}
            )
        },
    ),
    max_size=2,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A good body of which a few fields have been spoilt."""
    path = draw(st.sampled_from(sorted(OK)))
    names = sorted({*KINDS[path].model_fields, *NEUTRAL_FIELDS, "metadata", "what"} - {"model"})
    spoilt = draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=3))
    for name, values in (("messages", MESSAGES), ("tools", TOOLS)):
        if name in KINDS[path].model_fields and draw(st.booleans()):
            spoilt[name] = draw(values)
    return path, json.dumps(OK[path] | spoilt, ensure_ascii=draw(st.booleans())).encode(
        errors="surrogatepass"
    )


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(request=requests())
def test_no_body_breaks_the_server(
    talking: Frontend, http: httpx.Client, request: tuple[str, bytes]
) -> None:
    path, raw = request
    response = http.post(path, content=raw)
    assert response.status_code in (200, 400, 503), (path, raw, response.text)
    if response.status_code == 400:
        assert response.json()["error"]["message"]
