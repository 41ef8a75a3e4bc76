"""``<tool_call>{"name": NAME, "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3, QwQ."""

from __future__ import annotations

from pdx.text.calls.form import CallForm, JsonCall, Tags

__all__ = ["HERMES"]

_CALL = Tags(start="<tool_call>", end="</tool_call>")
HERMES = CallForm(
    name="hermes",
    is_taught_by=lambda template: _CALL.start in template,
    call=_CALL,
    body=JsonCall(name_key="name", arguments_keys=("arguments", "parameters")),
)
