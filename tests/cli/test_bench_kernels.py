"""`pdx bench kernels`: bounds without a GPU, and how what a GPU measures is shown."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pdx.cli.bench_kernels import measured_table
from pdx.cli.kernel_floors import GPUS, floors, static_figures


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdx", "bench", "kernels", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_decode_counts_each_byte_of_the_cache_once() -> None:
    work = {(each.op, each.shape): each for each in floors()}
    step = work["decode", "Llama-3.1-8B, Qwen3-8B: 32 x 4096"]
    cache = 32 * 4096 * 8 * 128 * 2 * 2
    assert step.num_bytes == cache + 2 * 32 * 32 * 128 * 2
    assert step.flops == 2 * 2 * 32 * 4096 * 32 * 128
    assert step.memory_us(GPUS["h200"]) == pytest.approx(step.num_bytes / 4.8e6)
    assert step.memory_us(GPUS["h200"]) > step.math_us(GPUS["h200"])


def test_prefill_counts_what_is_seen() -> None:
    work = {(each.op, each.shape): each for each in floors()}
    chunk = work["prefill", "Qwen3-30B-A3B: 512 after 0"]
    assert chunk.flops == 4 * 32 * 128 * sum(range(1, 513))
    mla = work["mla prefill", "DeepSeek-V3 DP: 2048 after 8192"]
    seen = sum(8192 + n for n in range(1, 2049))
    assert mla.flops == 2 * 128 * (192 + 128) * seen


def test_128_latent_heads_are_bound_by_math_and_16_by_memory() -> None:
    bound = {
        each.shape: each.math_us(GPUS["h200"]) > each.memory_us(GPUS["h200"])
        for each in floors()
        if each.op == "mla decode" and each.shape.endswith("128 x 32768")
    }
    assert bound == {"DeepSeek-V3 TP8: 128 x 32768": False, "DeepSeek-V3 DP: 128 x 32768": True}


def test_products_count_each_weight_once_and_experts_those_that_are_used() -> None:
    work = {(each.op, each.shape): each for each in floors()}
    product = work["linear", "Qwen3-8B qkv: 16 rows"]
    assert product.num_bytes == 2 * (6144 * 4096 + 16 * (6144 + 4096))
    assert product.flops == 2 * 16 * 6144 * 4096
    one, all_ = (work["experts", f"Qwen3-30B-A3B: {n} tokens"] for n in (1, 4096))
    assert one.num_bytes > 2 * 8 * 3 * 2048 * 768
    assert one.num_bytes < 2 * 9 * 3 * 2048 * 768
    assert all_.num_bytes > 2 * 128 * 3 * 2048 * 768
    assert all_.flops == 4096 * one.flops


@pytest.mark.parametrize("gpu", GPUS)
def test_every_recorded_launch_fits_a_multiprocessor(gpu: str) -> None:
    figures = {each.launch: each for each in static_figures(GPUS[gpu])}
    assert all(each.blocks_per_sm >= 1 for each in figures.values())
    decode = figures["decode g4 d128/paged_decode"]
    assert decode.issue_to_memory is not None
    assert decode.issue_to_memory < 1


def test_prints_tables_or_json() -> None:
    run = bench("--offline", "--gpu", "b200", "--json")
    answer = json.loads(run.stdout)
    assert answer["gpu"]["name"] == "B200"
    assert {"decode", "prefill", "mla decode", "mla prefill"} <= {x["op"] for x in answer["floors"]}
    assert "At least, on H200" in bench("--offline").stdout


def test_bounds_can_be_of_some_ops() -> None:
    answer = json.loads(bench("--offline", "--only", "mla prefill", "--json").stdout)
    assert {each["op"] for each in answer["floors"]} == {"mla prefill"}
    assert [each["launch"] for each in answer["compiled"]] == ["mla prefill/mla_prefill"]


def test_bounds_are_of_ops_that_the_gpu_has() -> None:
    """Float8 is refused on sm_80."""
    told = {gpu: bench("--offline", "--gpu", gpu).stdout for gpu in ("a100", "h200")}
    assert "float8" in told["h200"]
    assert "float8" not in told["a100"]


def row(op: str, **fields: object) -> dict[str, object]:
    return {
        "op": op,
        "shape": "32 x (4095 + 1)",
        "times": {"median": 200.0, "p20": 190.0, "p80": 230.0},
        "of_copy": 0.85,
        "tflops": 2.5,
        "others": {"torch": 300.0},
        "notes": {"flashinfer": "not installed"},
        "failure": None,
    } | fields


def test_others_are_multiples_of_ours_and_say_why_they_are_absent() -> None:
    rows = [
        row("decode"),
        row("norm", tflops=0.0, others={}, notes={}),
        row("linear", times=None, of_copy=None, tflops=None, others={}, notes={}, failure="no"),
    ]
    table = measured_table({"gpu": "H200", "copy_gb_per_s": 4312.4}, rows)
    assert table.title == "H200, a copy has 4312 GB/s"
    assert table.columns == ("op", "shape", "us", "of copy", "TFLOPS", "torch x", "flashinfer x")
    shape = "32 x (4095 + 1)"
    assert table.rows == (
        ("decode", shape, "200.0", "85%", "2.5", "1.50", "-"),
        ("norm", shape, "200.0", "85%", "-", "-", "-"),
        ("linear", shape, "failed", "-", "-", "-", "-"),
    )
    assert table.note.count("flashinfer: not installed") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "no GPU that torch can use"),
        ((), "--offline"),
        (("--offline", "--gpu", "v100"), "v100"),
        (("--offline", "--only", "decoed"), "--only decoed: no op begins so"),
        (("--offline", "--toy"), "--toy"),
    ],
)
def test_what_it_cannot_do_is_refused(arguments: tuple[str, ...], told: str) -> None:
    run = bench(*arguments)
    assert (run.returncode, run.stdout) == (2, "") or (run.returncode, run.stdout) == (1, "")
    assert told in run.stderr
