"""Writes the tables of docs/kernels.md: launches from the compile gate's records, and floors.

python scripts/kernel_tables.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pdx.cli.kernel_floors import GPUS, Static, floors, static_figures

ROOT = Path(__file__).resolve().parents[1]

PATH = ROOT / "docs" / "kernels.md"
RECORDS = ROOT / "pdx" / "kernels" / "compiled.json"
END = "<!-- end -->\n"
SHOWN = [GPUS[name] for name in ("a100", "h200", "b200")]
LAUNCHES_HEAD = """| launch | warps | registers | KiB | blocks | loop | issue/memory | matrix |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
FLOORS_HEAD = """| op | shape | MB | GFLOP | bound by | us at least |
| --- | --- | --- | --- | --- | --- |
"""
#: Shapes of the floors' table: one of each kind.
SHAPES = (
    ("decode", "Llama-3.1-8B, Qwen3-8B: 32 x 4096"),
    ("decode", "Llama-3.1-8B, Qwen3-8B: 1 x 32768"),
    ("decode", "Qwen3-Coder-480B TP8: 32 x 32768"),
    ("mla decode", "DeepSeek-V3 TP8: 32 x 4096"),
    ("mla decode", "DeepSeek-V3 DP: 128 x 4096"),
    ("mla decode float8", "DeepSeek-V3 DP: 128 x 4096"),
    ("prefill", "Llama-3.1-8B, Qwen3-8B: 8192 after 0"),
    ("mla prefill", "DeepSeek-V3 TP8: 8192 after 0"),
    ("linear", "Qwen3-8B gate, up: 1 rows"),
    ("linear", "Qwen3-8B gate, up: 4096 rows"),
    ("experts", "Qwen3-30B-A3B: 64 tokens"),
    ("norm of sum", "4096 wide: 4096 rows"),
)


def page() -> str:
    """The page as it should be: its text, with the tables of today's records."""
    text = PATH.read_text("utf-8")
    for name, table in (("launches", launches_table()), ("floors", floors_table())):
        begin = f"<!-- {name}, written by scripts/kernel_tables.py -->\n"
        before, found, rest = text.partition(begin)
        assert found, f"{PATH} has no place for its {name}"
        text = before + begin + table + END + rest.partition(END)[2]
    return text


def launches_table() -> str:
    """A row for each launch; a cell holds the figures for sm_80, sm_90 and sm_100."""
    records: dict[str, dict[str, Any]] = json.loads(RECORDS.read_text("utf-8"))
    statics = [{each.launch: each for each in static_figures(gpu)} for gpu in SHOWN]
    return LAUNCHES_HEAD + "".join(
        f"| {launch} | {' | '.join(_cells(launch, records, statics))} |\n"
        for launch in dict.fromkeys(label.rpartition(" sm_")[0] for label in records)
    )


def _cells(
    launch: str, records: dict[str, dict[str, Any]], statics: list[dict[str, Static]]
) -> Iterator[str]:
    found = [each.get(launch) for each in statics]

    def cell(figure: Callable[[Static], str]) -> str:
        return _joined(["-" if each is None else figure(each) for each in found])

    yield cell(lambda each: str(each.warps))
    yield cell(lambda each: str(each.registers))
    yield cell(lambda each: f"{each.shared_bytes / 1024:.0f}")
    yield cell(lambda each: str(each.blocks_per_sm))
    yield cell(lambda each: str(each.loop_instructions or "-"))
    yield cell(lambda each: "-" if each.issue_to_memory is None else f"{each.issue_to_memory:.2f}")
    yield _joined([_matrix(records.get(f"{launch} sm_{gpu.arch}")) for gpu in SHOWN])


def _joined(cells: list[str]) -> str:
    return cells[0] if len(set(cells)) == 1 else " / ".join(cells)


def _matrix(record: dict[str, Any] | None) -> str:
    kinds = ("wgmma", "tcgen05", "mma")
    return next((kind for kind in kinds if record and record["instructions"].get(kind)), "-")


def floors_table() -> str:
    """Of some shapes, on an H200's data sheet."""
    gpu, work = GPUS["h200"], {(each.op, each.shape): each for each in floors()}
    rows = []
    for key in SHAPES:
        each = work[key]
        memory, math = each.memory_us(gpu), each.math_us(gpu)
        bound = "memory" if memory > math else "math"
        cells = f"{each.num_bytes / 1e6:.1f} | {each.flops / 1e9:.1f}", bound, max(memory, math)
        rows.append(f"| {each.op} | {each.shape} | {cells[0]} | {cells[1]} | {cells[2]:.1f} |\n")
    return FLOORS_HEAD + "".join(rows)


if __name__ == "__main__":
    PATH.write_text(page(), "utf-8")
