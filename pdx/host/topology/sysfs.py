"""Reading small files of sysfs and procfs that may be missing, unreadable or nonsense.

A container hides what it likes: every function here answers None (or nothing) instead of raising.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["entries", "parse_list", "read_int", "read_number", "read_text", "real_path"]

#: Longer numbers count no CPUs.
_DIGITS = 6
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def read_text(path: Path) -> str | None:
    """The file's text without its end of line."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path, base: int = 10) -> int | None:
    """The file's one whole number."""
    text = read_text(path)
    try:
        return None if text is None else int(text, base)
    except ValueError:
        return None


def read_number(path: Path) -> float | None:
    """The first number in the file, as in "32.0 GT/s PCIe" or "400 Gb/sec (4X NDR)"."""
    found = _NUMBER.search(read_text(path) or "")
    return None if found is None else float(found[0])


def entries(folder: Path) -> list[Path]:
    """What is in the folder, by name."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def real_path(path: Path) -> Path | None:
    """Where a link leads; None if that is hidden."""
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError):
        return None


def parse_list(text: str | None) -> tuple[int, ...]:
    """The kernel's list format: "0-2,8" is 0, 1, 2, 8. Nothing for what is no such list."""
    numbers: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        ends = (first, last or first)
        if all(end.isdecimal() and len(end) < _DIGITS for end in ends):
            numbers.update(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(numbers))
