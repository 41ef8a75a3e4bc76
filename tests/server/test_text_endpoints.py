from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdx import __version__
from pdx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from conftest import Frontend

USER = [{"role": "user", "content": "Hi"}]
RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_text_is_tokenized_as_a_completions_prompt(
    frontend: Frontend, http: httpx.Client, tokenizer: Tokenizer
) -> None:
    answer = http.post("/tokenize", json={"model": "org/tiny", "prompt": "the 🙂"}).json()
    ids = tokenizer.encode("the 🙂")
    assert answer == {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": None}
    assert frontend.messages.empty()


def test_longer_than_the_context_is_no_error_here(frontend: Frontend, http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "word " * 20_000}).json()
    assert answer["count"] > 20_000
    text = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert text == {"prompt": "word " * 20_000}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, RENDERED),
        ({"add_generation_prompt": False}, RENDERED.removesuffix("<|im_start|>assistant\n")),
    ],
)
def test_chat_is_tokenized_as_its_prompt(
    frontend: Frontend, http: httpx.Client, fields: dict[str, Any], text: str
) -> None:
    body = {"messages": USER, "return_token_strs": True} | fields
    answer = http.post("/tokenize", json=body).json()
    assert len(answer["token_strs"]) == answer["count"]
    assert answer["token_strs"][0] == "<|im_start|>"
    back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": USER}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"prompt": "x", "what": 1}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": ["x"]}, 400),
        ("/detokenize", {"tokens": [512]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [10**30]}, 400),
    ],
)
def test_bad_input_is_refused(
    frontend: Frontend, http: httpx.Client, path: str, body: dict[str, Any], status: int
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_empty_text_has_no_tokens(frontend: Frontend, http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_version_is_told(frontend: Frontend, http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": __version__}
