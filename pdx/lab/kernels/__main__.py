"""Measures on this machine's GPU: lines of JSON on stdout, first what on, then a row for each case.

    python -m pdx.lab.kernels [--only TEXT] [--toy]

A process of its own, because a kernel's fault is the end of a process's GPU context, and because
commands do not import torch. ``pdx bench kernels`` starts it and shows what it says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch

from pdx.lab.kernels.case import Case
from pdx.lab.kernels.measure import copy_gb_per_s, gpu_times, measure

__all__ = ["main", "selected"]


def selected(device: torch.device, *, toy: bool, only: str = "") -> Iterator[Case]:
    """Cases whose op begins with ``only``; attention first."""
    from pdx.lab.kernels.attention import attention_cases
    from pdx.lab.kernels.dense import dense_cases

    for cases in (attention_cases, dense_cases):
        yield from (case for case in cases(device, toy) if case.op.startswith(only))


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 1 where something failed or differed, or nothing could be measured."""
    parser = argparse.ArgumentParser(prog="python -m pdx.lab.kernels")
    parser.add_argument("--only", default="", metavar="TEXT", help="ops that begin so")
    parser.add_argument("--toy", action="store_true", help="small shapes")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        _tell({"error": "no GPU that torch can use", "hint": "--offline has lower bounds"})
        return 1
    copy, failed = copy_gb_per_s(), False
    _tell(
        {
            "gpu": torch.cuda.get_device_name(),
            "copy_gb_per_s": copy,
            "torch": torch.__version__,
            "triton": _triton_version(),
        }
    )
    torch.manual_seed(0)
    for case in selected(torch.device("cuda"), toy=asked.toy, only=asked.only):
        row = measure(case, copy, gpu_times)
        failed |= row.failure is not None
        _tell(asdict(row))
    return int(failed)


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _tell(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # Libraries that compile print what they do; here stdout is for rows.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main())
