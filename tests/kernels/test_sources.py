"""What holds of every kernel's source: what the interpreter cannot tell."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "pdx" / "kernels").glob("*.py"))
#: Their operands are float16, whatever the tensors are.
NEVER_FLOAT32 = {"mla_decode_float8.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_products_of_float32_are_exact(path: Path) -> None:
    """A GPU rounds float32 operands to TF32 unless it is told not to; the interpreter never does,
    so no test there could find it."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    dots = [call for call in calls if ast.unparse(call.func) == "tl.dot"]
    told = [{k.arg: ast.unparse(k.value) for k in call.keywords} for call in dots]
    if path.name not in NEVER_FLOAT32:
        assert all(each.get("input_precision") == "'ieee'" for each in told)
