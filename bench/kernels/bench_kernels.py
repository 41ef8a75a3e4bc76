"""`pdx bench kernels` on a GPU, with rows for bench/results/kernels.csv. Without one it says so.

    python bench/kernels/bench_kernels.py                  rows go to bench/results/kernels.csv
    python bench/kernels/bench_kernels.py --only decode    of these ops
    python bench/kernels/bench_kernels.py --toy            small shapes, no row

A row has the median time in microseconds (and a fifth below and above), its bytes per second as a
share of what a copy of the same run reaches, and the times of other libraries for the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.rows import ROOT, append_row

OTHERS = ("torch", "flashinfer", "flash-attn")


def figures(about: dict[str, Any], row: dict[str, Any]) -> dict[str, object]:
    """The columns; a library without a time leaves its own empty."""
    others, times = row["others"], row["times"]
    return {
        "op": row["op"],
        "shape": row["shape"],
        **{f"{name}_us": f"{times[part]:.1f}" for name, part in _PARTS.items()},
        "of_copy": f"{row['of_copy']:.3f}",
        "tflops": f"{row['tflops']:.1f}",
        **{
            f"{name.replace('-', '_')}_us": f"{others[name]:.1f}" if name in others else ""
            for name in OTHERS
        },
        "copy_gb_per_s": f"{about['copy_gb_per_s']:.0f}",
        "gpu": about["gpu"],
        "triton": about["triton"],
    }


_PARTS = {"p50": "median", "p20": "p20", "p80": "p80"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="ops whose names begin so")
    parser.add_argument("--toy", action="store_true", help="small shapes, no row")
    asked = parser.parse_args()
    command = [sys.executable, "-m", "pdx.lab.kernels", "--only", asked.only]
    command += ["--toy"] * asked.toy
    about: dict[str, Any] = {}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            if "error" in told:
                print(f"{told['error']}: {told['hint']}", file=sys.stderr)
                return 0
            print(line, end="", flush=True)
            if "op" not in told:
                about = told
            elif told["failure"] is None and not asked.toy:
                append_row("kernels", figures(about, told))
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
