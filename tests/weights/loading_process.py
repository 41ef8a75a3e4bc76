"""Loads one rank's part of a folder as a rank does, and tells how much memory that took.

python -m tests.weights.loading_process FOLDER TP_SIZE DTYPE
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from pdx.checkpoint.model import ModelConfig
from pdx.kernels.ops import ops_for
from pdx.models.registry import build_drafts, build_model
from pdx.process.heap import keep_freed_memory
from pdx.weights.load import load_parameters
from tests.weights.ranks import LastOf


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def main() -> None:
    folder, tp_size, dtype = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    keep_freed_memory()
    torch.set_num_threads(1)
    config, group = ModelConfig.load(folder), LastOf(tp_size)
    with torch.device("meta"):
        model = build_model(config, ops_for("cpu"), group)
        drafts = build_drafts(config, ops_for("cpu"), group)
    torch.zeros(8).to(torch.bfloat16)
    before, peak, reports = anonymous_bytes(), 0, []

    def on_progress(done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, anonymous_bytes())
        reports.append(done)
        assert done <= total

    started = time.perf_counter()
    load_parameters(
        *(model, folder, getattr(torch, dtype), on_progress, config.quantization),
        left_on_disk=drafts,
    )
    load_s = time.perf_counter() - started
    kept = sum(parameter.nbytes for parameter in model.parameters())
    assert reports == sorted(reports)
    assert reports[-1] == kept
    told = {"kept": kept, "grown": max(peak, anonymous_bytes()) - before, "load_s": load_s}
    print(json.dumps(told | {"num_reports": len(reports)}))


main()
