"""The messages and tools of a chat request: their form is checked, and they are put the way chat
templates want them. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdx.errors import InvalidRequest
from pdx.text.chat_template import ChatTemplate

__all__ = ["checked_messages", "checked_tools", "num_chars"]


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template. Which roles may follow which is the template's business.

    Raises:
        InvalidRequest: a message has not the form of one.
    """
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def checked_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: object, template: ChatTemplate
) -> Sequence[Mapping[str, Any]]:
    """The tools that the model is shown: none where the client wants none called.

    Raises:
        InvalidRequest: a tool has not the form of one, or the template cannot show it; a call is
            demanded, which needs structured output.
    """
    for idx, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise InvalidRequest(
                f'tools[{idx}] must be {{"type": "function", "function": {{...}}}}', param="tools"
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(f"tools[{idx}].function.name must be a string", param="tools")
    if choice not in (None, "none", "auto"):
        shown = choice if isinstance(choice, str) else "of a named tool"
        raise InvalidRequest(
            f"tool_choice {shown[:80]} is not served: nothing here can make the model call a tool "
            'or write valid arguments; send "auto" or "none"',
            param="tool_choice",
        )
    if not tools or choice == "none":
        return ()
    if not template.takes_tools:
        raise InvalidRequest("the model's chat template shows no tools", param="tools")
    return tools


def num_chars(message: Mapping[str, Any]) -> int:
    """About how long a message's text is."""
    content = message["content"]
    if isinstance(content, str):
        return len(content)
    texts = (part.get("text") for part in content or () if isinstance(part, Mapping))
    return sum(len(text) for text in texts if isinstance(text, str))


def _checked_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise _refusal(f"{where}.role must be a string")
    calls = message.get("tool_calls")
    content = message.get("content")
    if not (isinstance(content, str | list) or (content is None and calls)):
        raise _refusal(f"{where}.content must be a string or a list of parts")
    checked = {**message, "content": content}
    if calls is not None:
        if not isinstance(calls, list):
            raise _refusal(f"{where}.tool_calls must be a list")
        checked["tool_calls"] = [
            _checked_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return checked


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    """A call with its arguments as an object: templates write them out as JSON themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _refusal(f"{where}.function.name must be a string")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise _refusal(f"{where}.function.arguments must be the JSON of an object")
    return {**call, "function": {**function, "arguments": arguments}}


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
