"""Our own OpenAPI document: what this server takes and gives, made from the types that it checks
and answers with. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from pdx import __version__
from pdx.metrics.timeline import RequestTimeline
from pdx.metrics.transfers import Transfers
from pdx.request.stream import FrontendConfig
from pdx.server.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from pdx.server.chat_shape import ChatAnswer, ChatChunk
from pdx.server.completion_shape import CompletionAnswer
from pdx.server.fields import IGNORED_FIELDS, NEUTRAL_FIELDS
from pdx.server.problems import ErrorBody
from pdx.server.queries import Detokenized, Health, ModelCard, ModelList, Tokenized, Version

__all__ = ["openapi_document"]

_Json = dict[str, Any]

_REF = "#/components/schemas/{}"
_BODIES: tuple[type[Body], ...] = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_ANSWERS = (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    Detokenized,
    ErrorBody,
    Health,
    ModelCard,
    ModelList,
    RequestTimeline,
    Tokenized,
    Transfers,
    Version,
)
_PAGE = {
    "description": "Prometheus's text format.",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}
_PROBLEMS = {
    "400": "The request is wrong, or can never be served.",
    "401": "The key is missing or wrong.",
    "404": "No such model, request or path.",
    "408": "The body did not arrive in time.",
    "413": "The body is too long.",
    "499": "The request was cancelled.",
    "502": "Another node broke the protocol.",
    "503": "No room, no prefiller, or a node was lost; try again.",
    "504": "The request took longer than the server allows.",
}


def openapi_document(config: FrontendConfig) -> _Json:
    """The document of a server with this configuration."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pdx",
            "version": __version__,
            "description": "OpenAI-compatible inference with prefill and decode on separate nodes.",
        },
        "paths": _paths(),
        "components": {"schemas": _schemas(config), **_security(config)},
        **({"security": [{"key": []}]} if config.api_key is not None else {}),
    }


def _paths() -> _Json:
    request_id = _parameter("request_id", {"type": "string", "minLength": 1})
    index = {"type": "integer", "minimum": 0, "maximum": 9999}
    choice = {"name": "choice", "in": "query", "schema": index}
    return {
        "/v1/completions": _post(CompletionBody, "CompletionAnswer", "CompletionAnswer"),
        "/v1/chat/completions": _post(ChatBody, "ChatAnswer", "ChatChunk"),
        "/v1/models": _get("ModelList"),
        "/v1/models/{model}": _get("ModelCard", _parameter("model", _ref("ModelName"))),
        "/tokenize": _post(TokenizeBody, "Tokenized"),
        "/detokenize": _post(DetokenizeBody, "Detokenized"),
        "/health": {"get": {"responses": {"200": _content("Health"), "503": _content("Health")}}},
        "/version": _get("Version"),
        "/metrics": {"get": {"responses": {"200": _PAGE}}},
        "/pdx/requests/{request_id}": _get("RequestTimeline", request_id, choice),
        "/pdx/transfers": _get("Transfers"),
    }


def _post(body: type[Body], answer: str, chunk: str | None = None) -> _Json:
    ok = _content(answer)
    if chunk is not None:
        ok["content"]["text/event-stream"] = {"schema": _event(chunk)}
    request = {
        "required": True,
        "content": {"application/json": {"schema": _ref(body.__name__)}},
    }
    return {"post": {"requestBody": request, "responses": {"200": ok, **_problems()}}}


def _get(answer: str, *parameters: _Json) -> _Json:
    responses = {"200": _content(answer), **_problems()}
    return {"get": {"parameters": list(parameters), "responses": responses}}


def _problems() -> _Json:
    return {code: _content("ErrorBody", text) for code, text in _PROBLEMS.items()}


def _content(schema: str, description: str = "The answer.") -> _Json:
    return {
        "description": description,
        "content": {"application/json": {"schema": _ref(schema)}},
    }


def _event(chunk: str) -> _Json:
    """The schema of one server-sent event."""
    text = f"The JSON of a {chunk}; at the end [DONE], or the JSON of an ErrorBody."
    data = {"type": "string", "description": text}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _parameter(name: str, schema: _Json) -> _Json:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _ref(name: str) -> _Json:
    return {"$ref": _REF.format(name)}


def _security(config: FrontendConfig) -> _Json:
    if config.api_key is None:
        return {}
    text = "The key may also come as the header x-api-key."
    return {"securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": text}}}


def _schemas(config: FrontendConfig) -> _Json:
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=_REF.format("{name}"))
    _, bodies = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=_REF.format("{model}")
    )
    found: _Json = answers | bodies["$defs"]
    found["ModelName"] = {"enum": [config.model_name]}
    for body in _BODIES:
        _complete(found[body.__name__], body, takes_unknown=config.ignore_unknown_fields)
    found["StreamOptions"]["additionalProperties"] = config.ignore_unknown_fields
    return found


def _complete(schema: _Json, body: type[Body], *, takes_unknown: bool) -> None:
    """Add what pydantic does not know: fields that are taken and change nothing."""
    properties = schema["properties"]
    properties["model"] = {"anyOf": [_ref("ModelName"), {"type": "null"}]}
    for name, values in (NEUTRAL_FIELDS | body.neutral).items():
        properties.setdefault(name, {"enum": [None, *values]})
    for name in sorted(IGNORED_FIELDS):
        properties[name] = {}
    schema["additionalProperties"] = takes_unknown
    if body is CompletionBody:
        schema["required"] = ["prompt"]
