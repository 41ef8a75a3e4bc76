"""The forms that are known here."""

from __future__ import annotations

from pdx.text.calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from pdx.text.calls.form import CallForm
from pdx.text.calls.hermes import HERMES
from pdx.text.calls.llama3 import LLAMA3
from pdx.text.calls.qwen3_coder import QWEN3_CODER

__all__ = ["FORMS", "call_form_of"]

#: The first one that a template teaches counts: Qwen3-Coder's also has the tags of Hermes.
FORMS: tuple[CallForm, ...] = (QWEN3_CODER, HERMES, DEEPSEEK_V3, DEEPSEEK_V31, LLAMA3)


def call_form_of(template: str) -> CallForm | None:
    """The form that a chat template's source teaches; None: none that is known here."""
    return next((form for form in FORMS if form.is_taught_by(template)), None)
