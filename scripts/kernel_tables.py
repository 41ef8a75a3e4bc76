"""Writes the table of docs/kernels.md from the compile gate's records.

python scripts/kernel_tables.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "docs" / "kernels.md"
RECORDS = ROOT / "pdx" / "kernels" / "compiled.json"
BEGIN, END = "<!-- written by scripts/kernel_tables.py -->\n", "<!-- end -->\n"
ARCHS = ("80", "90", "100")
HEAD = """| launch | registers | shared KiB | loop | matrix instructions |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The page as it should be: its text, with the table of today's records."""
    before, _, rest = PATH.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def table() -> str:
    """A row for each launch; a cell holds the figures for sm_80, sm_90 and sm_100."""
    records: dict[str, dict[str, Any]] = json.loads(RECORDS.read_text("utf-8"))
    launches = list(dict.fromkeys(label.rpartition(" sm_")[0] for label in records))
    rows = []
    for launch in launches:
        found = [records.get(f"{launch} sm_{arch}") for arch in ARCHS]
        cells = [
            [str(each["registers"]) if each else "-" for each in found],
            [f"{each['shared_bytes'] / 1024:.0f}" if each else "-" for each in found],
            [str(each["loop"]["total"] or "-") if each else "-" for each in found],
            [_matrix(each) if each else "-" for each in found],
        ]
        rows.append(f"| {launch} | " + " | ".join(" / ".join(cell) for cell in cells) + " |\n")
    return HEAD + "".join(rows)


def _matrix(record: dict[str, Any]) -> str:
    kinds = ("wgmma", "tcgen05", "mma")
    return next((kind for kind in kinds if record["instructions"].get(kind)), "-")


if __name__ == "__main__":
    PATH.write_text(page(), "utf-8")
