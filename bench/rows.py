"""Result rows: what was measured, and on what. One CSV file per bench under ``bench/results``."""

from __future__ import annotations

import csv
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["ROOT", "append_row"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def append_row(name: str, figures: dict[str, object]) -> Path:
    """Add a row to ``bench/results/<name>.csv``: the figures, then where they come from.

    A file whose columns differ is an older form of the bench: the row is refused, so that columns
    are never mixed.
    """
    row = {"date": datetime.now(UTC).isoformat(timespec="seconds")} | figures | _circumstances()
    path = RESULTS / f"{name}.csv"
    RESULTS.mkdir(parents=True, exist_ok=True)
    if path.exists():
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        if header != list(row):
            raise SystemExit(f"{path} has other columns than this bench; move it away first")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(row)
    return path


def _circumstances() -> dict[str, object]:
    return {
        "load_1min": f"{os.getloadavg()[0]:.2f}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "libfabric": _libfabric(),
        "commit": _commit(),
        "command": " ".join(["python", *map(_relative, sys.argv)]),
    }


def _relative(argument: str) -> str:
    return argument.removeprefix(f"{ROOT}/")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _libfabric() -> str:
    from pdx.errors import FabricError
    from pdx.fabric import library_info

    try:
        info = library_info()
    except (FabricError, OSError):  # benches of kernels run where the fabric was not built
        return ""
    return str(getattr(info, "version", info))


def _commit() -> str:
    if shutil.which("git") is None:  # a bench needs none to measure
        return ""
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip()
