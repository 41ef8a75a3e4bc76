"""docs/kernels.md shows the compile gate's records."""

from __future__ import annotations

from scripts.kernel_tables import PATH, page


def test_page_shows_the_records() -> None:
    assert PATH.read_text("utf-8") == page(), "run python scripts/kernel_tables.py"
