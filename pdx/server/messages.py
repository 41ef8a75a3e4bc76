"""The messages and tools of a chat request: their form is checked. What they mean is the business
of ``pdx.text.chat_history``. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdx.errors import InvalidRequest
from pdx.text.chat_template import ChatTemplate

__all__ = ["checked_messages", "checked_tools", "is_long_chat"]

#: Chats with more characters or messages are rendered in a thread.
_INLINE_CHARS = 4096
_INLINE_MESSAGES = 32


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Messages for a template. Which roles may follow which is the template's business.

    Raises:
        InvalidRequest: a message has not the form of one.
    """
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    for idx, message in enumerate(messages):
        _check_message(message, f"messages[{idx}]")
    return messages


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


def is_long_chat(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> bool:
    """Rendering may take long enough to hold up others. Tools and calls have texts of any depth and
    are not measured."""
    if len(messages) > _INLINE_MESSAGES or tools:
        return True
    has_calls = any("tool_calls" in m or "function_call" in m for m in messages)
    return has_calls or sum(map(_num_chars, messages)) > _INLINE_CHARS


def _num_chars(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    if isinstance(content, list):
        return sum(len(part["text"]) for part in content if isinstance(part.get("text"), str))
    return len(content or "")


def _check_message(message: Mapping[str, Any], where: str) -> None:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise _refusal(f"{where}.role must be a string")
    # An answer of calls only has no content, a tool may have nothing to say, and clients that dump
    # their models send null for an empty text.
    may_be_none = "content" in message or role in ("assistant", "tool", "function")
    if not (isinstance(content, str | list) or (content is None and may_be_none)):
        raise _refusal(f"{where}.content must be a string or a list of parts")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, Mapping):
            raise _refusal(f"{where}.content must be a string or a list of parts")
    calls, legacy = message.get("tool_calls") or [], message.get("function_call")
    if not isinstance(calls, list):
        raise _refusal(f"{where}.tool_calls must be a list")
    for idx, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        _check_function(function, f"{where}.tool_calls[{idx}].function")
    if legacy:
        _check_function(legacy, f"{where}.function_call")


def _check_function(function: Any, where: str) -> None:
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _refusal(f"{where}.name must be a string")
    if not isinstance(function.get("arguments") or {}, str | Mapping):
        raise _refusal(f"{where}.arguments must be an object, or the JSON of one")


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
