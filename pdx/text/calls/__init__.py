"""Tool calls in a model's text: what forms there are (`forms.py`, a file each), and a finder for
all of them.
"""

from __future__ import annotations

from pdx.text.calls.finder import CallFinder, Part
from pdx.text.calls.form import CallForm, ToolCall
from pdx.text.calls.forms import FORMS, call_form_of

__all__ = ["FORMS", "CallFinder", "CallForm", "Part", "ToolCall", "call_form_of"]
