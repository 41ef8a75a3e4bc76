"""The real rank process, spoken to as a primary speaks to it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdx.checkpoint.model import ModelConfig
from pdx.kv.geometry import kv_layout
from pdx.kv.layout import KvLayout
from pdx.kv.progress import end_value, layer_value
from pdx.request.batch import RequestStart
from pdx.request.ids import IdArray
from pdx.request.request import SamplingParams
from tests.oracle.transformers_oracle import Oracle
from tests.runner.rank_process import (
    GREEDY,
    PAGE_SIZE,
    PageFeed,
    RankProcess,
    rank_config,
)

NUM_PAGES = 64
NUM_LAYERS = 3


def layout_of(folder: Path, num_pages: int = NUM_PAGES) -> KvLayout:
    return kv_layout(ModelConfig.load(folder), PAGE_SIZE, num_pages, "float32")


def kv_of(rank: RankProcess, layout: KvLayout) -> np.ndarray:
    """A copy of the KV memory as [L, P, Hkv, 2, S, D]."""
    shape = (
        layout.num_layers,
        layout.num_pages,
        layout.num_kv_heads,
        2,
        layout.page_size,
        layout.head_dim,
    )
    return np.frombuffer(rank.kv[:], dtype=np.float32).reshape(shape)


def poison(rank: RankProcess) -> None:
    """Fill all pages with NaN, from outside."""
    rank.kv[:] = np.full(len(rank.kv) // 4, np.nan, dtype=np.float32).tobytes()


def start(request_id: int, tokens: list[int], **changes: object) -> RequestStart:
    plain = RequestStart(
        request_id=request_id,
        token_ids=IdArray(tokens),
        num_computed=0,
        first_output_idx=0,
        sampling=GREEDY,
    )
    return msgspec.structs.replace(plain, **changes)


@pytest.fixture(scope="module")
def shared_rank(tiny_llama: Path) -> Iterator[RankProcess]:
    """One ready rank for tests that leave no requests in it; pages may hold anything."""
    with RankProcess(rank_config(tiny_llama)) as rank:
        rank.wait_ready()
        yield rank


@pytest.fixture
def fresh_rank(tiny_llama: Path) -> Iterator[RankProcess]:
    with RankProcess(rank_config(tiny_llama)) as rank:
        rank.wait_ready()
        yield rank


def test_reports_loading_then_readiness_and_exports_its_memory(
    fresh_rank: RankProcess, tiny_llama: Path
) -> None:
    assert fresh_rank.ready is not None
    layout = layout_of(tiny_llama)
    assert fresh_rank.ready.num_pages == NUM_PAGES
    assert fresh_rank.ready.kv_bytes == layout.total_bytes
    last = fresh_rank.loading[-1]
    assert last.done_bytes == last.total_bytes > 0
    assert fresh_rank.progress_value == 0  # the warm-up pass published nothing
    assert select.select([fresh_rank.eventfd], [], [], 0)[0] == []
    assert np.isnan(kv_of(fresh_rank, layout)).all()  # and wrote into no page


@pytest.mark.parametrize(
    ("length", "num_tokens"),
    [(1, 48), (9, 48), (33, 48), (64, 48), (170, 48)]
    + [(length, 8) for length in (2, 15, 16, 17, 63, 65, 66, 128, 129)],
)
def test_greedy_text_equals_transformers(
    length: int,
    num_tokens: int,
    shared_rank: RankProcess,
    tiny_oracle: Oracle,
    tiny_prompt_ids: list[int],
) -> None:
    prompt = tiny_prompt_ids[:length]
    pages = list(range(NUM_PAGES))[::-1]
    tokens = shared_rank.generate(length, prompt, num_tokens, pages)
    assert tiny_oracle.greedy(prompt, num_tokens).agrees_with([t.token_id for t in tokens])


def test_v5_layout_gives_the_same_text(
    tiny_llama_v5: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = tiny_prompt_ids[:33]
    with RankProcess(rank_config(tiny_llama_v5)) as rank:
        rank.wait_ready()
        tokens = rank.generate(1, prompt, 48, list(range(10)))
    assert tiny_oracle.greedy(prompt, 48).agrees_with([t.token_id for t in tokens])


def test_context_to_the_model_limit(
    shared_rank: RankProcess, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = (tiny_prompt_ids * 3)[:511]
    tokens = shared_rank.generate(1, prompt, 1, list(range(32)))
    assert tiny_oracle.greedy(prompt, 1).agrees_with([t.token_id for t in tokens])


def test_log_probabilities_are_the_oracles(
    shared_rank: RankProcess, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = tiny_prompt_ids[:20]
    tokens = shared_rank.generate(1, prompt, 8, list(range(8)))
    ids = prompt + [t.token_id for t in tokens]
    logprobs = torch.log_softmax(tiny_oracle.logits(ids), dim=-1)
    expected = [float(logprobs[19 + i, t.token_id]) for i, t in enumerate(tokens)]
    assert [t.logprob for t in tokens] == pytest.approx(expected, abs=1e-4)


def test_log_probabilities_and_alternatives_of_drawn_tokens_are_the_oracles(
    shared_rank: RankProcess, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    sampling = SamplingParams(
        max_tokens=99, temperature=1.4, top_k=50, presence_penalty=1.0, seed=8, logprobs=5
    )
    prompt = tiny_prompt_ids[:20]
    tokens = shared_rank.generate(1, prompt, 16, list(range(8)), sampling)
    ids = prompt + [t.token_id for t in tokens]
    logprobs = torch.log_softmax(tiny_oracle.logits(ids), dim=-1)
    for row, token in zip(logprobs[19:], tokens, strict=False):
        check_scored(token.token_id, token.logprob, token.top, row)
        assert len(token.top) == 5


def check_scored(
    token_id: int, logprob: float, top: list[tuple[int, float]], row: torch.Tensor
) -> None:
    """A token and its alternatives have the log-probabilities of the oracle's row [V]."""
    assert logprob == pytest.approx(float(row[token_id]), abs=1e-4)
    assert [p for _, p in top] == pytest.approx(row.topk(len(top)).values.tolist(), abs=1e-4)
    assert [p for _, p in top] == pytest.approx([float(row[i]) for i, _ in top], abs=1e-4)


@pytest.mark.parametrize("num_top", [0, 4])
@pytest.mark.parametrize("chunk_len", [200, 64, 17, 1])
def test_prompt_scores_are_the_oracles_however_the_prompt_is_cut(
    shared_rank: RankProcess,
    tiny_oracle: Oracle,
    tiny_prompt_ids: list[int],
    chunk_len: int,
    num_top: int,
) -> None:
    """What a prefiller does: all but the last token are run, and that one is scored as well."""
    prompt = tiny_prompt_ids[:120] if chunk_len > 1 else tiny_prompt_ids[:20]
    scored = start(1, prompt[:-1], sampling=None, prompt_logprobs=num_top, next_token_id=prompt[-1])
    feed, starts, scores = PageFeed(list(range(8))), [scored], []
    for begin in range(0, len(prompt) - 1, chunk_len):
        end = min(begin + chunk_len, len(prompt) - 1)
        output = shared_rank.run_pass([feed.step(1, begin, end, sample=False)], starts)
        [part] = output.prompt_scores
        assert (part.request_id, part.first_position) == (1, begin + 1)
        scores += part.tokens
        starts = []
    shared_rank.run([], removes=[1])
    assert [s.token_id for s in scores] == prompt[1:]
    logprobs = torch.log_softmax(tiny_oracle.logits(prompt), dim=-1)
    for row, token in zip(logprobs, scores, strict=False):
        check_scored(token.token_id, token.logprob, token.top, row)
        assert len(token.top) == num_top


def test_prompt_is_scored_beside_requests_that_decode(
    shared_rank: RankProcess, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompts = {1: tiny_prompt_ids[:10], 2: tiny_prompt_ids[30:70], 3: tiny_prompt_ids[90:130]}
    feeds = {i: PageFeed(list(range(16 * i, 16 * i + 16))) for i in prompts}
    shared_rank.run([feeds[1].step(1, 0, 9, sample=False)], [start(1, prompts[1])])
    starts = [start(2, prompts[2]), start(3, prompts[3], prompt_logprobs=2)]
    steps = [
        feeds[1].step(1, 9, 10, sample=True),
        feeds[2].step(2, 0, 40, sample=True),
        feeds[3].step(3, 0, 40, sample=True),  # the last position is sampled, not scored
    ]
    output = shared_rank.run_pass(steps, starts)
    shared_rank.run([], removes=[1, 2, 3])
    assert [t.request_id for t in output.tokens] == [1, 2, 3]
    [scores] = output.prompt_scores
    assert (scores.request_id, scores.first_position) == (3, 1)
    assert [s.token_id for s in scores.tokens] == prompts[3][1:]
    logprobs = torch.log_softmax(tiny_oracle.logits(prompts[3]), dim=-1)
    for row, token in zip(logprobs, scores.tokens, strict=False):
        check_scored(token.token_id, token.logprob, token.top, row)


def test_mixed_prefill_and_decode_in_one_pass(
    shared_rank: RankProcess, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    """Four requests that start at different passes; decode steps first, then one chunk."""
    lengths = {1: 33, 2: 17, 3: 1, 4: 100}
    prompts = {i: tiny_prompt_ids[5 * i : 5 * i + n] for i, n in lengths.items()}
    feeds = {i: PageFeed(list(range(16 * (i - 1), 16 * i))) for i in prompts}
    done = dict.fromkeys(prompts, 0)
    output: dict[int, list[int]] = {i: [] for i in prompts}
    waiting = list(prompts)
    prefilling: list[int] = []
    while any(len(tokens) < 24 for tokens in output.values()):
        starts = []
        if waiting:
            prefilling.append(waiting.pop(0))
            starts.append(start(prefilling[-1], prompts[prefilling[-1]]))
        steps = []
        for i, prompt in prompts.items():
            if i not in waiting and done[i] >= len(prompt) - 1 and len(output[i]) < 24:
                steps.append(feeds[i].step(i, done[i], done[i] + 1, sample=True))
                done[i] += 1
        chunked = [i for i in prefilling if done[i] < len(prompts[i]) - 1]
        if chunked:
            end = min(done[chunked[0]] + 40, len(prompts[chunked[0]]) - 1)
            steps.append(feeds[chunked[0]].step(chunked[0], done[chunked[0]], end, sample=False))
            done[chunked[0]] = end
        for token in shared_rank.run(steps, starts):
            output[token.request_id].append(token.token_id)
    shared_rank.run([], removes=list(prompts))
    for i, prompt in prompts.items():
        assert tiny_oracle.greedy(prompt, 24).agrees_with(output[i]), i


def test_decode_from_pages_that_somebody_else_wrote(
    shared_rank: RankProcess, tiny_oracle: Oracle, tiny_llama: Path, tiny_prompt_ids: list[int]
) -> None:
    """What a transfer does: KV arrives from outside, page by page, and a request starts on it."""
    prompt = tiny_prompt_ids[:37]
    layout = layout_of(tiny_llama)
    source, destination = [5, 9, 1], [40, 41, 39]
    poison(shared_rank)
    step = PageFeed(source).step(1, 0, 36, sample=False, zero_last_page=True)
    assert shared_rank.run([step], [start(1, prompt, sampling=None)]) == []
    for layer in range(NUM_LAYERS):
        for ours, theirs in zip(destination, source, strict=True):
            begin = layout.page_offset_bytes(layer, theirs)
            target = layout.page_offset_bytes(layer, ours)
            page = shared_rank.kv[begin : begin + layout.page_bytes]
            shared_rank.kv[target : target + layout.page_bytes] = page
            shared_rank.kv[begin : begin + layout.page_bytes] = b"\xff" * layout.page_bytes
    feed = PageFeed([*destination, 38])
    output = []
    starts, removes = [start(2, prompt, num_computed=36)], [1]
    for position in range(36, 60):
        step = feed.step(2, position, position + 1, sample=True)
        output += shared_rank.run([step], starts, removes)
        starts, removes = [], []
    shared_rank.run([], removes=[2])
    assert tiny_oracle.greedy(prompt, 24).agrees_with([t.token_id for t in output])


def test_unwritten_memory_is_never_read_and_only_own_pages_are_written(
    shared_rank: RankProcess, tiny_llama: Path, tiny_prompt_ids: list[int]
) -> None:
    poison(shared_rank)
    # One NaN read would end the rank, since logits must be finite.
    shared_rank.generate(1, tiny_prompt_ids[:20], 15, [7, 3, 11])
    written = ~np.isnan(kv_of(shared_rank, layout_of(tiny_llama)))
    assert sorted(np.flatnonzero(written.any(axis=(0, 2, 3, 4, 5)))) == [3, 7, 11]
    # 20 + 15 - 1 tokens: the last one sampled has not been run.
    assert written[:, 11, :, :, :2].all()
    assert not written[:, 11, :, :, 2:].any()


def test_last_page_is_zeroed_after_its_last_token(
    shared_rank: RankProcess, tiny_llama: Path, tiny_prompt_ids: list[int]
) -> None:
    poison(shared_rank)
    step = PageFeed([2, 6]).step(1, 0, 20, sample=False, zero_last_page=True)
    shared_rank.run([step], [start(1, tiny_prompt_ids[:30])])
    shared_rank.run([], removes=[1])
    kv = kv_of(shared_rank, layout_of(tiny_llama))
    assert (kv[:, 6, :, :, 4:] == 0).all()
    assert (kv[:, 6, :, :, :4] != 0).all()
    assert not np.isnan(kv[:, [2, 6]]).any()


def test_progress_word_ends_at_the_pass_end_and_wakes(
    shared_rank: RankProcess, tiny_prompt_ids: list[int]
) -> None:
    shared_rank.run([])  # a pass without work counts too
    assert shared_rank.progress_value == end_value(shared_rank.pass_idx, NUM_LAYERS)
    feed = PageFeed(list(range(8)))
    starts = [start(1, tiny_prompt_ids[:64])]
    os.eventfd_read(shared_rank.eventfd)
    for begin in (0, 32):
        shared_rank.run([feed.step(1, begin, begin + 32, sample=False)], starts)
        starts = []
        assert shared_rank.progress_value == end_value(shared_rank.pass_idx, NUM_LAYERS)
        # A wake per layer, and one for the end.
        assert os.eventfd_read(shared_rank.eventfd) == NUM_LAYERS + 1
    shared_rank.run([], removes=[1])


def test_layer_is_published_when_it_is_in_memory_and_before_the_next_is_computed(
    shared_rank: RankProcess, tiny_llama: Path, tiny_prompt_ids: list[int]
) -> None:
    """The fabric worker posts a layer's pages on this value, while the pass goes on."""
    shared_rank.run([])
    poison(shared_rank)
    # A full counter and a blocking descriptor (the flag is shared) hold the rank at its first wake.
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(shared_rank.eventfd)
    os.eventfd_write(shared_rank.eventfd, 2**64 - 2)
    os.set_blocking(shared_rank.eventfd, True)
    step = PageFeed([8, 3]).step(1, 0, 32, sample=False)
    shared_rank.send([step], [start(1, tiny_prompt_ids[:40])])
    pass_idx = shared_rank.pass_idx
    first = layer_value(pass_idx, 0, NUM_LAYERS)
    deadline_s = time.monotonic() + 20
    while (value := shared_rank.progress_value) != first:
        assert value == end_value(pass_idx - 1, NUM_LAYERS)
        assert time.monotonic() < deadline_s
    kv = kv_of(shared_rank, layout_of(tiny_llama))
    assert not np.isnan(kv[0, [8, 3]]).any()
    assert np.isnan(kv[1:]).all()
    os.set_blocking(shared_rank.eventfd, False)
    os.eventfd_read(shared_rank.eventfd)
    shared_rank.receive()
    assert not np.isnan(kv_of(shared_rank, layout_of(tiny_llama))[:, [8, 3]]).any()
    shared_rank.run([], removes=[1])


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": {7: 3.0}, "min_tokens": 14, "stop_token_ids": (3, 4, 5)},
    ],
    ids=["plain", "output penalties", "repetition", "bias"],
)
def test_sampled_text_repeats_from_any_token_on(
    shared_rank: RankProcess, tiny_prompt_ids: list[int], rules: dict[str, Any]
) -> None:
    """A preemption: the output so far comes back as known tokens, the next index goes on."""
    sampling = SamplingParams(
        max_tokens=99, temperature=1.5, top_p=0.95, seed=1234567890123456789, **rules
    )
    prompt = tiny_prompt_ids[:20]
    whole = [t.token_id for t in shared_rank.generate(1, prompt, 24, list(range(8)), sampling)]
    assert len(set(whole)) > 12
    feed = PageFeed(list(range(20, 28)))
    known = prompt + whole[:10]
    starts = [start(1, known, first_output_idx=10, sampling=sampling)]
    shared_rank.run([feed.step(1, 0, len(known) - 1, sample=False)], starts)
    resumed = []
    for position in range(len(known) - 1, len(known) + 13):
        resumed += shared_rank.run([feed.step(1, position, position + 1, sample=True)])
    shared_rank.run([], removes=[1])
    assert [t.token_id for t in resumed] == whole[10:]


def test_batches_may_be_sent_while_the_pass_before_runs(
    shared_rank: RankProcess, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = tiny_prompt_ids[:9]
    feed = PageFeed([1, 2, 3])
    starts = [start(1, prompt)]
    shared_rank.run([feed.step(1, 0, 8, sample=False)], starts)
    for position in range(8, 20):
        shared_rank.send([feed.step(1, position, position + 1, sample=True)])
    output = [shared_rank.receive().tokens[0].token_id for _ in range(8, 20)]  # type: ignore[union-attr]
    shared_rank.run([], removes=[1])
    assert tiny_oracle.greedy(prompt, 12).agrees_with(output)


def test_exported_memory_cannot_be_cut_short(shared_rank: RankProcess) -> None:
    with pytest.raises(OSError, match="not permitted"):
        shared_rank.kv.resize(4096)


def test_damaged_checkpoint_is_reported(tiny_llama: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_llama / "model.safetensors")
    del weights["model.layers.2.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with RankProcess(rank_config(tmp_path)) as rank:
        failure = rank.expect_failure()
    assert failure.kind == "CheckpointError"
    assert "missing: model.layers.2.mlp.down_proj.weight" in failure.message


def test_broken_batch_is_reported_and_ends_the_rank(fresh_rank: RankProcess) -> None:
    fresh_rank.send([PageFeed([1]).step(99, 0, 1, sample=True)])
    failure = fresh_rank.expect_failure()
    assert failure.kind == "InternalError"
    assert "request 99" in failure.message
    assert "Traceback" in failure.traceback
    assert "pdx/runner/" in failure.traceback


def test_read_of_unwritten_memory_is_reported_not_sampled(
    fresh_rank: RankProcess, tiny_prompt_ids: list[int]
) -> None:
    # Ten tokens are said to be in a page that nobody has written.
    started = start(1, tiny_prompt_ids[:11], num_computed=10)
    fresh_rank.send([PageFeed([1]).step(1, 10, 11, sample=True)], [started])
    failure = fresh_rank.expect_failure()
    assert "not finite" in failure.message


def test_interrupt_is_ignored(shared_rank: RankProcess, tiny_prompt_ids: list[int]) -> None:
    shared_rank.process.send_signal(signal.SIGINT)
    assert len(shared_rank.generate(1, tiny_prompt_ids[:5], 2, [0])) == 2


def test_rank_ends_when_the_socket_closes(fresh_rank: RankProcess) -> None:
    fresh_rank.sock.shutdown(socket.SHUT_RDWR)
    assert fresh_rank.process.wait(timeout=20) == 0


def test_rank_dies_with_its_parent(tiny_llama: Path) -> None:
    """A parent that is killed takes its rank along, although a copy of the socket stays open."""
    ours, parents = socket.socketpair()
    parent = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("parent.py")), str(parents.fileno())],
        pass_fds=[parents.fileno()],
    )
    parents.close()
    try:
        ours.settimeout(50)
        ours.sendall(msgspec.json.encode(rank_config(tiny_llama)) + b"\n")
        with ours.makefile() as lines:
            pidfd = os.pidfd_open(int(lines.readline()))
        try:
            assert select.select([pidfd], [], [], 0)[0] == []
            parent.kill()
            assert select.select([pidfd], [], [], 20)[0] == [pidfd]
        finally:
            os.close(pidfd)
    finally:
        parent.kill()
        parent.wait()
        ours.close()
