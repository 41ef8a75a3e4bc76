"""Access to the bundled model and to scripts, whose folders are no packages."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "models" / "smollm2-135m-instruct"
CASES: list[dict[str, Any]] = json.loads((FOLDER / "golden.json").read_text("utf-8"))["cases"]


def load(path: Path) -> ModuleType:
    """A script as a module."""
    name = f"loaded_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
