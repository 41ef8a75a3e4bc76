"""The document that describes this server is true, and no input that it can describe breaks it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema_rs  # comes with schemathesis
import pytest

if TYPE_CHECKING:
    from conftest import Frontend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection"
)


@pytest.fixture
def document(frontend: Frontend, http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def is_valid(document: dict[str, Any], name: str, value: Any) -> bool:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return jsonschema_rs.Draft202012Validator(schema).is_valid(value)


def test_every_route_is_described(document: dict[str, Any], http: httpx.Client) -> None:
    for path, methods in document["paths"].items():
        for method in methods:
            url = path.replace("{model}", "org/tiny").replace("{request_id}", "x")
            assert http.request(method, url, json={}).status_code in (200, 400, 404)


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("CompletionBody", COMPLETIONS, {"prompt": "Hi", "logprobs": 2, "n": 2, "echo": True}),
        ("CompletionBody", COMPLETIONS, {"prompt": [5], "best_of": 1, "stop": ["x"], "user": "me"}),
        ("CompletionBody", COMPLETIONS, {"prompt": "Hi", "suffix": "", "return_token_ids": True}),
        ("CompletionBody", COMPLETIONS, {"prompt": "Hi", "suffix": "x"}),
        ("CompletionBody", COMPLETIONS, {"prompt": "Hi", "what": 1}),
        ("CompletionBody", COMPLETIONS, {"prompt": "Hi", "temperature": 3}),
        ("CompletionBody", COMPLETIONS, {"prompt": "Hi", "model": "other"}),
        (
            "ChatBody",
            CHAT,
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1},
        ),
        (
            "ChatBody",
            CHAT,
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
        ),
        ("TokenizeBody", "/tokenize", {"prompt": "x", "return_token_strs": True}),
        ("DetokenizeBody", "/detokenize", {"tokens": [5]}),
        ("DetokenizeBody", "/detokenize", {"tokens": "x"}),
    ],
)
def test_document_allows_what_the_server_takes(
    talking: Frontend,
    http: httpx.Client,
    document: dict[str, Any],
    name: str,
    path: str,
    body: dict[str, Any],
) -> None:
    response = http.post(path, json={"model": "org/tiny"} | body)
    assert (response.status_code == 200) == is_valid(document, name, body)
    described = document["paths"][path]["post"]["responses"][str(response.status_code)]
    schema = described["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert is_valid(document, schema, response.json())


def test_document_says_when_a_key_is_needed(start: Callable[..., Frontend]) -> None:
    url = start(api_key="k").url + "/openapi.json"
    assert httpx.get(url).status_code == 401
    found = httpx.get(url, headers={"Authorization": "Bearer k"}).json()
    assert found["security"] == [{"key": []}]
    assert found["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("phases", "num_examples"),
    [("fuzzing", 3), pytest.param("examples,coverage,fuzzing", 50, marks=pytest.mark.slow)],
)
def test_no_generated_request_breaks_the_server(
    talking: Frontend, phases: str, num_examples: int, tmp_path: Path
) -> None:
    schemathesis = [sys.executable, "-m", "schemathesis.cli", "run", talking.url + "/openapi.json"]
    options = ["--checks", CHECKS, "--phases", phases, "--workers", "1"]
    limits = ["--max-examples", str(num_examples), "--seed", "7", "--request-timeout", "30"]
    run = subprocess.run(
        [*schemathesis, "--url", talking.url, *options, *limits, "--no-color"],
        cwd=tmp_path,  # it keeps a folder of examples
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
