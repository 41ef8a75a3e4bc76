"""``{"name": NAME, "parameters": {...}}`` without tags, ``;`` between several (small ones write
``,``): Llama 3.1 to 3.3."""

from __future__ import annotations

from pdx.text.calls.form import CallForm, JsonCall

__all__ = ["LLAMA3"]

#: Llama's templates ask for the form in these words.
_LESSON = '"parameters": dictionary of argument name'
LLAMA3 = CallForm(
    name="llama3",
    is_taught_by=lambda template: _LESSON in template,
    body=JsonCall(name_key="name", arguments_keys=("parameters", "arguments")),
    prefix="<|python_tag|>",
    separators=";,",
)
