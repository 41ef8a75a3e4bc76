"""What kernels must move and compute at least, on named GPUs, and what the compiled kernels show.

Arithmetic on shapes and on the compile gate's records: lower bounds. Nothing here was timed, and
nothing says how near to a bound a kernel comes. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

__all__ = ["GPUS", "Gpu", "Static", "Work", "floors", "static_figures"]

_ITEMSIZE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A data sheet: dense bfloat16 without sparsity, boost clock."""

    name: str
    arch: int
    memory_gb_per_s: float
    tflops: float
    num_sms: int
    ghz: float
    shared_bytes_per_sm: int

    @property
    def bytes_per_sm_cycle(self) -> float:
        """One multiprocessor's share of the memory's bandwidth."""
        return self.memory_gb_per_s / self.ghz / self.num_sms


GPUS = {
    "a100": Gpu(
        name="A100 SXM 80 GB",
        arch=80,
        memory_gb_per_s=2039,
        tflops=312,
        num_sms=108,
        ghz=1.41,
        shared_bytes_per_sm=164 << 10,
    ),
    "h100": Gpu(
        name="H100 SXM",
        arch=90,
        memory_gb_per_s=3350,
        tflops=989,
        num_sms=132,
        ghz=1.83,
        shared_bytes_per_sm=228 << 10,
    ),
    "h200": Gpu(
        name="H200 SXM",
        arch=90,
        memory_gb_per_s=4800,
        tflops=989,
        num_sms=132,
        ghz=1.83,
        shared_bytes_per_sm=228 << 10,
    ),
    "b200": Gpu(
        name="B200",
        arch=100,
        memory_gb_per_s=8000,
        tflops=2250,
        num_sms=148,
        ghz=1.85,
        shared_bytes_per_sm=228 << 10,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One launch's bytes to and from memory, each once, and its multiplications and additions."""

    op: str
    shape: str
    num_bytes: int
    flops: int

    def runs_on(self, gpu: Gpu) -> bool:
        """Whether pdx has the op there: before sm_90, float8 is refused."""
        return gpu.arch >= 90 or "float8" not in f"{self.op} {self.shape}"

    def memory_us(self, gpu: Gpu) -> float:
        """At the data sheet's bandwidth."""
        return self.num_bytes / gpu.memory_gb_per_s / 1e3

    def math_us(self, gpu: Gpu) -> float:
        """At the data sheet's rate."""
        return self.flops / gpu.tflops / 1e6


#: Query heads, KV heads, head dim on one rank.
_GROUPED = {
    "Llama-3.1-8B, Qwen3-8B": (32, 8, 128),
    "Llama-3.1-70B TP4": (16, 2, 128),
    "Qwen3-30B-A3B": (32, 4, 128),
    "Qwen3-Coder-480B TP8": (12, 1, 128),
}
#: Heads on one rank; latents of 512 + 64.
_LATENT = {"DeepSeek-V3 TP8": 16, "DeepSeek-V3 DP": 128}
_STEPS = [(batch, length) for batch in (1, 32, 128) for length in (4096, 32768)]
_CHUNKS = [(512, 0), (2048, 0), (8192, 0), (2048, 8192), (2048, 65536)]


def floors() -> Iterator[Work]:
    """The shapes of models that pdx is for."""
    for model, (heads, kv_heads, dim) in _GROUPED.items():
        for batch, length in _STEPS:
            yield Work(
                op="decode",
                shape=f"{model}: {batch} x {length}",
                num_bytes=_ITEMSIZE * batch * 2 * (length * kv_heads * dim + heads * dim),
                flops=4 * batch * length * heads * dim,
            )
        for new, cached in _CHUNKS:
            yield Work(
                op="prefill",
                shape=f"{model}: {new} after {cached}",
                num_bytes=_ITEMSIZE * 2 * ((new + cached) * kv_heads * dim + new * heads * dim),
                flops=4 * _seen(new, cached) * heads * dim,
            )
    for model, heads in _LATENT.items():
        for form, token_bytes in (("", 576 * _ITEMSIZE), (" float8", 656)):
            for batch, length in _STEPS:
                rows = _ITEMSIZE * batch * heads * (576 + 512)
                yield Work(
                    op=f"mla decode{form}",
                    shape=f"{model}: {batch} x {length}",
                    num_bytes=batch * length * token_bytes + rows,
                    flops=2 * batch * length * heads * (576 + 512),
                )
        for new, cached in _CHUNKS:
            context = (new + cached) * (heads * 256 + 64)
            yield Work(
                op="mla prefill",
                shape=f"{model}: {new} after {cached}",
                num_bytes=_ITEMSIZE * (context + new * heads * (192 + 128)),
                flops=2 * _seen(new, cached) * heads * (192 + 128),
            )
    yield from _dense_floors()


#: Outputs and inputs of a layer's projections on one rank.
_PROJECTIONS = {
    "Qwen3-8B qkv": (6144, 4096),
    "Qwen3-8B gate, up": (24576, 4096),
    "Qwen3-8B down": (4096, 12288),
}
#: Experts, experts of a token, hidden and inner size on one rank, bytes of a weight.
_EXPERTS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768, 2),
    "DeepSeek-V3 TP8 float8": (256, 8, 7168, 256, 1),
}
_ROWS = (1, 16, 64, 4096)


def _dense_floors() -> Iterator[Work]:
    """Products, experts with tokens spread evenly over them, and norms of a residual sum."""
    for name, (outputs, inputs) in _PROJECTIONS.items():
        for rows in _ROWS:
            yield Work(
                op="linear",
                shape=f"{name}: {rows} rows",
                num_bytes=_ITEMSIZE * (outputs * inputs + rows * (outputs + inputs)),
                flops=2 * rows * outputs * inputs,
            )
    for name, (experts, chosen, hidden, inner, itemsize) in _EXPERTS.items():
        for rows in _ROWS:
            used = experts * (1 - (1 - chosen / experts) ** rows)
            weights = itemsize * round(used) * 3 * hidden * inner
            # A pair's inner values and its output are written and read once.
            values = 2 * rows * hidden + 2 * rows * chosen * (3 * inner + hidden)
            yield Work(
                op="experts",
                shape=f"{name}: {rows} tokens",
                num_bytes=weights + _ITEMSIZE * values,
                flops=2 * rows * chosen * 3 * hidden * inner,
            )
    for hidden in (4096, 7168):
        for rows in _ROWS:
            yield Work(
                op="norm of sum",
                shape=f"{hidden} wide: {rows} rows",
                num_bytes=_ITEMSIZE * 4 * rows * hidden,
                flops=5 * rows * hidden,
            )


def _seen(new: int, cached: int) -> int:
    """Pairs of a row and a token that it sees."""
    return new * cached + new * (new + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """A compiled kernel on a GPU, from its machine code."""

    launch: str
    registers: int
    shared_bytes: int
    warps: int
    blocks_per_sm: int
    loop_instructions: int
    #: Cycles to issue a loop's instructions over cycles for its loads at the data sheet's
    #: bandwidth, for one iteration; None: its loop loads nothing ahead. Above 1, memory is not the
    #: wall.
    issue_to_memory: float | None


def static_figures(gpu: Gpu) -> Iterator[Static]:
    """Figures of every launch that the compile gate recorded for this GPU's architecture."""
    records = json.loads((files("pdx") / "kernels" / "compiled.json").read_text("utf-8"))
    for label, record in records.items():
        launch, _, arch = label.rpartition(" sm_")
        if int(arch) == gpu.arch:
            yield _static(launch, record, gpu)


def _static(launch: str, record: dict[str, Any], gpu: Gpu) -> Static:
    warps, shared = record["warps"], record["shared_bytes"]
    # Registers are handed out to warps in steps of 256; a block costs 1 KiB of shared memory.
    warp_registers = -(-record["registers"] * 32 // 256) * 256
    by_registers = 65536 // warp_registers // warps
    by_shared = gpu.shared_bytes_per_sm // (shared + 1024)
    instructions = record["loop"]["total"]
    memory_cycles = record["loop_bytes"] / gpu.bytes_per_sm_cycle
    return Static(
        launch=launch,
        registers=record["registers"],
        shared_bytes=shared,
        warps=warps,
        blocks_per_sm=min(by_registers, by_shared, 64 // warps, 32),
        loop_instructions=instructions,
        # A multiprocessor issues for four warps a cycle.
        issue_to_memory=instructions * warps / 4 / memory_cycles if memory_cycles else None,
    )
