"""Reads what the sanitizers wrote, and says which reports have a frame of the fabric's library.

usage: sanitizer_reports.py KIND FOLDER; exit status 1 if there is one.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

_OURS = re.compile(r"libpdx_fabric\.so|/pdx/fabric/native/")
#: Where a report begins: leaks are listed one by one.
_BEGIN = re.compile(
    r"^(?:={10,}$|.*ERROR: AddressSanitizer|(?:Direct|Indirect) leak of|.*runtime error:"
    r"|WARNING: ThreadSanitizer)",
    re.MULTILINE,
)


def main() -> None:
    """Print a summary to stderr, each report of ours whole."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    ours, others = [], Counter[str]()
    for path in sorted(folder.iterdir()):
        for report in reports(path.read_text("utf-8", errors="replace")):
            if _OURS.search(report):
                ours.append(report)
            else:
                others[report.splitlines()[0][:60]] += 1
    for report in ours:
        print(report, file=sys.stderr)
    print(
        f"{kind}: {len(ours)} reports with a frame of ours, {others.total()} without",
        file=sys.stderr,
    )
    sys.exit(1 if ours else 0)


def reports(text: str) -> list[str]:
    """The reports of one process."""
    starts = [match.start() for match in _BEGIN.finditer(text)]
    return [
        text[start:end].strip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True)
    ]


if __name__ == "__main__":
    main()
