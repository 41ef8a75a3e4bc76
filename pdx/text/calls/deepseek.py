"""DeepSeek's forms: tags around all calls and around each, with the arguments in a fenced block of
Markdown (V3, R1) or plain (V3.1)."""

from __future__ import annotations

from pdx.text.calls.form import CallForm, NamedJson, Tags

__all__ = ["DEEPSEEK_V3", "DEEPSEEK_V31"]

_SECTION = Tags(start="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>")
_CALL = Tags(start="<｜tool▁call▁begin｜>", end="<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


def _is_fenced(template: str) -> bool:
    return _FENCE in template


DEEPSEEK_V3 = CallForm(
    name="deepseek-v3",
    is_taught_by=lambda template: _SECTION.start in template and _is_fenced(template),
    section=_SECTION,
    call=_CALL,
    body=NamedJson(separator=_SEPARATOR, fence=_FENCE, is_fenced=True),
)
DEEPSEEK_V31 = CallForm(
    name="deepseek-v3.1",
    is_taught_by=lambda template: _SECTION.start in template and not _is_fenced(template),
    section=_SECTION,
    call=_CALL,
    body=NamedJson(separator=_SEPARATOR, fence=_FENCE, is_fenced=False),
)
