"""Passes of a rank whose decode steps are captured, beside one that launches op by op.

`python -m tests.runner.captured FOLDER,SCRIPT[,KV_DTYPE]...`, with PDX_KERNELS=interpret and
TRITON_INTERPRET=1: a recorder takes the part of the capture. Prints JSON, an entry an argument.
In a script's place "waits" or "drafts": a rank that has no graphs because of it.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdx.kernels.graphs import Captured, GraphCapture, GraphSettings
from pdx.kv.progress import end_value
from pdx.request.batch import Batch, RequestStart, RequestStep, StepOutput
from pdx.request.request import SamplingParams
from pdx.runner.device import RankDevice
from tests.runner.kernel_runner import KernelRunner, kernel_runner, staged_cpu
from tests.runner.waits import ask

NUM_PAGES = 12
GREEDY = SamplingParams(max_tokens=99, temperature=0.0, logprobs=1)
DRAWN = SamplingParams(
    max_tokens=99, temperature=0.9, top_p=0.9, seed=4, logprobs=2, presence_penalty=0.4
)
SCORED = SamplingParams(max_tokens=99, temperature=0.0, prompt_logprobs=1)


@dataclass(kw_only=True)
class Replays:
    """A capture that counts: the size of each replay, in order."""

    stock: GraphCapture
    sizes: list[int] = field(default_factory=list)

    def capture(self, run: Callable[[], Tensor]) -> Captured:
        return _Counted(self.stock.capture(run), self.sizes)


@dataclass(frozen=True)
class _Counted:
    graph: Captured
    sizes: list[int]

    @property
    def output(self) -> Tensor:
        return self.graph.output

    def replay(self) -> None:
        self.sizes.append(len(self.output))
        self.graph.replay()


class Script:
    """Requests and their steps, the same for both ranks."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.params: dict[int, SamplingParams] = {}
        self.prompt_lens: dict[int, int] = {}
        self.starts: list[RequestStart] = []
        self.removes: list[int] = []

    def start(self, request_id: int, prompt: list[int], params: SamplingParams) -> None:
        self.texts[request_id] = list(prompt)
        self.params[request_id], self.prompt_lens[request_id] = params, len(prompt)
        self.again(request_id)

    def again(self, request_id: int) -> None:
        """From its first token on, the output so far included."""
        text = self.texts[request_id]
        params = self.params[request_id]
        self.starts.append(
            RequestStart(
                request_id=request_id,
                token_ids=list(text),
                num_computed=0,
                first_output_idx=len(text) - self.prompt_lens[request_id],
                sampling=params,
                prompt_logprobs=params.prompt_logprobs,
            )
        )

    def took(self, output: StepOutput) -> None:
        for token in output.tokens:
            self.texts[token.request_id].append(token.token_id)
        self.starts, self.removes = [], []


def chunk(request_id: int, num_tokens: int, pages: list[int]) -> RequestStep:
    return RequestStep(
        request_id=request_id, num_tokens=num_tokens, new_page_indices=pages, sample=False
    )


def step(request_id: int, pages: tuple[int, ...] = ()) -> RequestStep:
    return RequestStep(
        request_id=request_id, num_tokens=1, new_page_indices=list(pages), sample=True
    )


#: A pass's steps, and whether a graph should run it.
Passes = Iterator[tuple[list[RequestStep], bool]]


def long_script(script: Script) -> Passes:
    """Joins, leaves, a preemption, scores, more requests than the largest graph's 3."""
    script.start(0, list(range(5, 20)), GREEDY)
    script.start(1, [9, 8, 7, 6], DRAWN)
    yield [chunk(0, 14, [4]), chunk(1, 3, [11])], False
    yield [step(0), step(1)], True
    yield [step(0)], True  # at position 15, the page's last
    script.start(2, [30], GREEDY)  # a prompt of one token: its first pass is a step
    yield [step(1), step(2, (0,)), step(0, (2,))], True
    yield [], False
    script.start(3, [41], GREEDY)
    yield [step(i) for i in range(3)] + [step(3, (1,))], False
    script.removes = [0, 3]  # request 0 is preempted, another page 1 is its next one
    script.again(0)
    yield [chunk(0, len(script.texts[0]) - 1, [10, 1]), step(2)], False  # a chunk and a step
    script.start(4, [51, 52], SCORED)
    yield [step(2), step(0), chunk(4, 1, [4])], False  # scores a prompt's second token
    script.removes = [2]
    yield [step(4), step(0)], True


def short_script(script: Script) -> Passes:
    """A chunk, a join and a leave."""
    script.start(0, [5, 6, 7, 8], GREEDY)
    yield [chunk(0, 3, [4])], False
    script.start(1, [9], GREEDY)
    yield [step(0), step(1, (2,))], True
    script.start(2, [10], GREEDY)
    yield [step(2, (11,)), step(1), step(0)], True
    script.removes = [1]
    yield [step(0), step(2)], True


SCRIPTS = {"long": (long_script, (1, 3)), "short": (short_script, (3,))}


@dataclass(kw_only=True)
class Run:
    """What one rank gave in all passes."""

    #: Of each pass: request, token, ids of the likeliest and log-probability of all that was drawn
    #: or scored.
    outputs: list[list[Any]] = field(default_factory=list)
    #: Values that the word has had: of each pass that a graph should run.
    words: list[list[int]] = field(default_factory=list)
    #: The size of the graph that ran each pass, and of the one that should have; 0: none.
    replayed: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)


def run_all(
    rank: KernelRunner,
    passes: Callable[[Script], Passes],
    replays: Replays,
    sizes: Sequence[int],
    seen: list[int],
) -> Run:
    """All of a script's passes.

    Args:
        replays: what the rank's captures went to; of one that captures nothing a fresh one.
        sizes: of the graphs.
        seen: gets the word's values while a pass runs.
    """
    found, script = Run(), Script()
    num_layers = rank.layout.num_layers
    for pass_idx, (steps, is_captured) in enumerate(passes(script), start=1):
        seen.clear()
        replays.sizes.clear()
        output = rank.runner.execute(
            Batch(pass_idx=pass_idx, starts=script.starts, steps=steps, removes=script.removes)
        )
        script.took(output)
        assert word(rank) == end_value(pass_idx, num_layers)
        told = [(token.request_id, token) for token in output.tokens]
        told += [(each.request_id, token) for each in output.prompt_scores for token in each.tokens]
        found.outputs.append(
            [[request, t.token_id, [i for i, _ in t.top], t.logprob] for request, t in told]
        )
        found.replayed.append(sum(replays.sizes))
        found.expected.append(min(s for s in sizes if s >= len(steps)) if is_captured else 0)
        if is_captured:
            # The pass's end is not the graph's, and the pass before it is seen at first.
            begun = pass_idx * (num_layers + 1)
            layers = range(begun + 1, begun + num_layers + 1)
            found.words.append([value for value, _ in groupby(seen) if value in layers])
    return found


def word(rank: KernelRunner) -> int:
    return int.from_bytes(rank.progress[:8], "little")


def captured_runner(
    folder: Path, device: RankDevice, capture: GraphCapture, sizes: Sequence[int], **options: Any
) -> KernelRunner:
    """A runner that has captured, in its warm-up; what this leaves behind is checked."""
    settings = GraphSettings(capture=capture, sizes=sizes, max_seq_len=NUM_PAGES * 16)
    rank = kernel_runner(folder, device, num_pages=NUM_PAGES, graph_settings=settings, **options)
    before = rank.kv.clone()
    rank.runner.warm_up()
    assert word(rank) == 0, "a capture published"
    assert not num_differing(rank.kv, before), "a capture wrote to a page"
    return rank


def check_outputs(found: list[Any], wanted: list[Any], *, tolerance: float) -> None:
    """Of two runs: tokens are equal, what is told of them is near."""
    assert sum(map(len, found)) >= 7
    for ours, theirs in zip(found, wanted, strict=True):
        assert [token[:3] for token in ours] == [token[:3] for token in theirs]
        assert [t[3] for t in ours] == pytest.approx([t[3] for t in theirs], abs=tolerance)


def num_differing(x: Tensor, y: Tensor) -> int:
    """Bytes."""
    return int((x.view(torch.uint8) != y.view(torch.uint8)).sum())


def compare(folder: Path, script: str, kv_dtype: str | None = None) -> dict[str, Any]:
    """Both ranks through a script."""
    from tests.kernels.triton.recorder import Recorder

    passes, sizes = SCRIPTS[script]
    seen: list[int] = []
    plain = kernel_runner(folder, staged_cpu(), num_pages=NUM_PAGES, kv_dtype=kv_dtype)
    publish = plain.runner._progress.publish

    def publish_and_look(step: int) -> None:
        publish(step)
        seen.append(word(plain))

    plain.runner._progress.publish = publish_and_look  # type: ignore[method-assign]
    wanted = run_all(plain, passes, Replays(stock=Recorder()), sizes, seen)

    recorder = Recorder()
    replays = Replays(stock=recorder)
    rank = captured_runner(folder, staged_cpu(), replays, sizes, kv_dtype=kv_dtype)
    for graph in recorder.graphs:
        graph.behind_each = lambda: seen.append(word(rank))
    found = run_all(rank, passes, replays, sizes, seen)
    return {
        "differing_kv_bytes": num_differing(rank.kv, plain.kv),
        "outputs": [found.outputs, wanted.outputs],
        "words": [found.words, wanted.words],
        "sizes": [found.replayed, found.expected],
    }


def without_graphs(
    folder: Path, cause: str, device: RankDevice, capture: GraphCapture
) -> dict[str, Any]:
    """A warm-up that gives no graphs, and a pass behind it."""
    messages = logging.StreamHandler(io.StringIO())
    logging.getLogger("pdx").addHandler(messages)
    settings = GraphSettings(capture=capture, sizes=(1,), max_seq_len=32)
    rank = kernel_runner(
        folder, device, num_pages=2, drafts=cause == "drafts", graph_settings=settings
    )
    if cause == "waits":
        rank.runner._model.model.norm.register_forward_pre_hook(ask)
    rank.runner.warm_up()
    told = {
        "is_none": rank.runner.graphs is None,
        "log": messages.stream.getvalue().splitlines(),
        "word": word(rank),
        "kv_is_untouched": bool(rank.kv.isnan().all()),
    }
    script = Script()
    script.start(0, [30], GREEDY)
    output = rank.runner.execute(
        Batch(pass_idx=1, starts=script.starts, steps=[step(0, (1,))], removes=[])
    )
    return told | {"num_tokens": len(output.tokens)}


def main() -> None:
    from tests.kernels.triton.recorder import Recorder

    torch.set_num_threads(1)
    found = []
    for job in sys.argv[1:]:
        folder, what, *options = job.split(",")
        if what in SCRIPTS:
            found.append(compare(Path(folder), what, *options))
        else:
            found.append(without_graphs(Path(folder), what, staged_cpu(), Recorder()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
