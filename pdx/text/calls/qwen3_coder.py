"""Qwen3-Coder's form, in lines:

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from pdx.text.calls.form import CallForm, Parameters, Tags

__all__ = ["QWEN3_CODER"]

_CALL = Tags(start="<tool_call>", end="</tool_call>")
_BODY = Parameters(
    name_start="<function=",
    name_end=">",
    key_start="<parameter=",
    key_end=">",
    value_end="</parameter>",
    end="</function>",
)
QWEN3_CODER = CallForm(
    name="qwen3-coder",
    is_taught_by=lambda template: _CALL.start in template and _BODY.name_start in template,
    call=_CALL,
    body=_BODY,
)
