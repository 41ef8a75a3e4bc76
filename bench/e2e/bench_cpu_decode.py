"""A rank's passes on a CPU beside transformers, in alternating rounds in one process: prefill of
1,024 tokens, and decode of 1 and 8 requests after 128 tokens.

Ours is the whole of a pass as a rank runs it (inputs, model, progress words, sampling), without the
socket. Theirs is the leanest loop that their model allows: its cache, `argmax`, no `generate`.
The model is any folder; by default the demo's (`scripts/demo` makes it). `--toy`: small, once, no
row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in a rank; read when torch is imported

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.rows import ROOT, append_row
from pdx.config.heap import keep_freed_memory
from pdx.config.model import ModelConfig
from pdx.kernels.ops import ops_for
from pdx.kv.geometry import kv_layout
from pdx.models.registry import build_model
from pdx.models.sharding import LoneRank
from pdx.request.batch import Batch, RequestStart, RequestStep
from pdx.request.request import SamplingParams
from pdx.runner.memory import export_kv, export_progress
from pdx.runner.model_runner import ModelRunner
from pdx.weights.load import load_parameters

MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
PAGE_SIZE, NUM_PAGES = 16, 512
#: Seconds of prefill, and of each decode step.
Run = Callable[[list[list[int]], int], tuple[float, list[float]]]


class Ours:
    """A rank without its socket."""

    def __init__(self, folder: Path, dtype: str) -> None:
        config = ModelConfig.load(folder)
        layout = kv_layout(config, PAGE_SIZE, NUM_PAGES, dtype)
        with torch.device("meta"):
            model = build_model(config, ops_for("cpu"))
        load_parameters(model, folder, getattr(torch, dtype), lambda done, total: None)
        self._memory, kv = export_kv(layout, getattr(torch, dtype), poison=True)
        self._progress = export_progress()
        self._runner = ModelRunner(model.eval(), config, kv, layout, self._progress[2], LoneRank())
        self._pass_idx = 0

    def run(self, prompts: list[list[int]], num_steps: int) -> tuple[float, list[float]]:
        """Prefill (all but the last token), then decode all prompts together."""
        greedy = SamplingParams(max_tokens=num_steps, temperature=0.0)
        pages = iter(range(NUM_PAGES))
        num_pages = -(-(len(prompts[0]) + num_steps) // PAGE_SIZE)
        prefill_s = 0.0
        for idx, prompt in enumerate(prompts):
            start = RequestStart(
                request_id=idx,
                token_ids=prompt,
                num_computed=0,
                first_output_idx=0,
                sampling=greedy,
            )
            step = RequestStep(
                request_id=idx,
                num_tokens=len(prompt) - 1,
                new_page_indices=list(itertools.islice(pages, num_pages)),
                sample=False,
            )
            prefill_s += self._execute([step], starts=[start])
        one = [
            RequestStep(request_id=idx, num_tokens=1, new_page_indices=[], sample=True)
            for idx in range(len(prompts))
        ]
        steps_s = [self._execute(one) for _ in range(num_steps)]
        self._execute([], removes=list(range(len(prompts))))
        return prefill_s, steps_s

    def _execute(self, steps: list[RequestStep], **fields: Any) -> float:
        self._pass_idx += 1
        batch = Batch(
            pass_idx=self._pass_idx, steps=steps, **({"starts": [], "removes": []} | fields)
        )
        started = time.perf_counter()
        self._runner.execute(batch)
        return time.perf_counter() - started


class Theirs:
    """transformers."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        ).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], num_steps: int) -> tuple[float, list[float]]:
        """The same work."""
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        out = self._model(ids[:, :-1], use_cache=True, logits_to_keep=1)
        prefill_s = time.perf_counter() - started
        token, cache, steps_s = ids[:, -1:], out.cache, []
        for _ in range(num_steps):
            started = time.perf_counter()
            out = self._model(token, cache=cache, use_cache=True)
            token = out.logits[:, -1].argmax(dim=-1, keepdim=True)
            token.tolist()
            steps_s.append(time.perf_counter() - started)
        return prefill_s, steps_s


def prompts_of(num: int, length: int) -> list[list[int]]:
    """Seeded ids that every vocabulary has."""
    generator = random.Random(1)
    return [[generator.randrange(3, 31_000) for _ in range(length)] for _ in range(num)]


def measure(run: Run, prefill_len: int, num_steps: int) -> dict[str, float]:
    """One round: milliseconds."""
    prefill_s, _ = run(prompts_of(1, prefill_len + 1), 1)
    figures = {"prefill_ms": prefill_s * 1e3}
    for num in (1, 8):
        _, steps_s = run(prompts_of(num, 128), num_steps)
        figures[f"decode_b{num}_step_ms"] = statistics.median(steps_s) * 1e3
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="small, once, no row")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=128)
    arguments = parser.parse_args()
    if not arguments.model.is_dir():
        raise SystemExit(f"{arguments.model} is missing: run scripts/demo once")
    keep_freed_memory()  # as in a rank; both sides gain
    torch.set_num_threads(arguments.threads)
    prefill_len, num_steps, rounds = 1024, arguments.steps, arguments.rounds
    if arguments.toy:
        prefill_len, num_steps, rounds = 64, 4, 1
    runs: dict[str, Run] = {
        "pdx": Ours(arguments.model, arguments.dtype).run,
        "transformers": Theirs(arguments.model, arguments.dtype).run,
    }
    for run in runs.values():
        measure(run, prefill_len, 2)  # warms up
    results: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in sorted(runs, reverse=number % 2 == 1):
            results[name].append(measure(runs[name], prefill_len, num_steps))
    figures: dict[str, object] = {
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "rounds": rounds,
        "prefill_tokens": prefill_len,
        "decode_steps": num_steps,
    }
    for what in results["pdx"][0]:
        ours = [figures_[what] for figures_ in results["pdx"]]
        theirs = [figures_[what] for figures_ in results["transformers"]]
        figures[f"{what}"] = f"{statistics.median(ours):.2f}"
        figures[f"{what}_transformers"] = f"{statistics.median(theirs):.2f}"
        ratios = [t / o for o, t in zip(ours, theirs, strict=True)]
        figures[f"{what}_speedup"] = f"{statistics.median(ratios):.2f}"
    print(json.dumps(figures, indent=1))
    if not arguments.toy:
        print(f"row added to {append_row('cpu_decode', figures).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
