"""Sampling: the CPU's words and tokens; ties, filters at their ends, padded rows, broken rows."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels import sampling as module
from pdx.kernels.cpu.sampling import sample_row as cpu_sample_row
from pdx.kernels.philox import token_uniform
from pdx.kernels.reference.philox import token_uniform as uniform_reference
from pdx.kernels.reference.sampling import sample_row
from pdx.kernels.sampling import sample
from pdx.request.request import SamplingParams
from tests.kernels.triton.cases import DEVICE

NAN, INF = float("nan"), float("inf")
SEEDS = [0, 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a few hundred has many blocks."""
    monkeypatch.setattr(module, "_BLOCK", 128)


def tensors(
    rows: list[dict[str, float]], seeds: list[int] | None = None, first_idx: int = 0
) -> dict[str, Tensor]:
    """Of rows whose fields may be left out; row n draws for output token ``first_idx`` + n."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        values = [row.get(name, default) for row in rows]
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    seeds = seeds or [7] * len(rows)
    signed = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
    return {
        "temperature": column("temperature", 1.0, torch.float64),
        "top_k": column("top_k", 0, torch.int32),
        "top_p": column("top_p", 1.0, torch.float64),
        "min_p": column("min_p", 0.0, torch.float64),
        "seed": torch.tensor(signed, device=DEVICE),
        "output_idx": torch.arange(first_idx, first_idx + len(rows), device=DEVICE),
    }


def expected(logits: Tensor, rows: list[dict[str, float]], first_idx: int = 0) -> list[int]:
    """By the reference, and by a CPU's op, which agree."""
    tokens = []
    for idx, (row, fields) in enumerate(zip(logits, rows, strict=True)):
        params = SamplingParams(max_tokens=1, seed=7, **fields)
        names = (params.temperature, params.top_k, params.top_p, params.min_p)
        token = sample_row(row, *names, 7, first_idx + idx)
        assert token == cpu_sample_row(row, *names, 7, first_idx + idx)
        tokens.append(token)
    return tokens


def check(logits: Tensor, fields: dict[str, float], num_draws: int = 4) -> list[int]:
    """Draws of one row of logits."""
    rows = [fields] * num_draws
    many = logits.expand(num_draws, -1).contiguous()
    tokens = sample(many.to(DEVICE), **tensors(rows)).tolist()
    assert tokens == expected(many, rows)
    return tokens


@triton.jit
def _uniform_kernel(seed_ptr, index_ptr, out_ptr):
    row = tl.program_id(0)
    tl.store(out_ptr + row, token_uniform(tl.load(seed_ptr + row), tl.load(index_ptr + row)))


def test_numbers_are_the_cpus() -> None:
    indices = [0, 1, 12345, 2**32 - 1, 2**32, 2**40 + 3]
    pairs = [(seed, index) for seed in SEEDS for index in indices]
    signed = [seed - 2**64 if seed >= 2**63 else seed for seed, _ in pairs]
    out = torch.empty(len(pairs), dtype=torch.float64, device=DEVICE)
    index = torch.tensor([index for _, index in pairs], device=DEVICE)
    _uniform_kernel[(len(pairs),)](torch.tensor(signed, device=DEVICE), index, out)
    assert out.tolist() == [uniform_reference(*pair) for pair in pairs]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"temperature": 5.0, "top_k": 1},
        {"top_k": 17},
        {"top_k": 300},
        {"top_p": 0.9},
        {"top_p": 1e-9},
        {"top_p": 1 - 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.6, "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_are_the_cpus(fields: dict[str, float]) -> None:
    check(torch.randn(1, 300) * 3, fields)


@pytest.mark.parametrize("fields", [{"top_k": 3}, {"top_p": 0.55}, {"top_k": 5, "top_p": 0.5}])
def test_of_equal_logits_lower_ids_stay(fields: dict[str, float]) -> None:
    """Equal ones in two blocks, below one that is higher; both zeros are equal."""
    logits = torch.full((1, 140), -30.0)
    logits[0, 10::10] = 0.0
    logits[0, 20::20] = -0.0
    logits[0, 100] = 0.5
    tokens = check(logits, fields, 8)
    assert len(set(tokens)) > 1


def test_rows_have_settings_of_their_own() -> None:
    rows = [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {}]
    logits = torch.randn(5, 100)
    assert sample(logits.to(DEVICE), **tensors(rows, first_idx=9)).tolist() == expected(
        logits, rows, 9
    )


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    logits = torch.zeros(2, 200)
    logits[1, [70, 150]] = 1.0
    assert sample(logits.to(DEVICE), **tensors([{"temperature": 0.0}] * 2)).tolist() == [0, 70]


def test_ids_past_the_tokenizers_are_never_drawn() -> None:
    logits = torch.randn(6, 160)
    logits[:, 130:] = 50.0
    rows = [{"temperature": float(n % 2), "top_k": 40} for n in range(6)]
    tokens = sample(logits.to(DEVICE), **tensors(rows), num_ids=130).tolist()
    assert tokens == expected(logits[:, :130], rows)


def test_what_is_held_back_is_never_drawn() -> None:
    logits = torch.full((8, 70), -INF)
    logits[:, [3, 68]] = 1.0
    rows = [{"top_p": 0.99, "top_k": 30}] * 8
    tokens = sample(logits.to(DEVICE), **tensors(rows)).tolist()
    assert set(tokens) == {3, 68}
    assert tokens == expected(logits, rows)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's maximum tells; a GPU's does not
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_have_no_token(temperature: float) -> None:
    logits = torch.randn(5, 100)
    logits[0] = NAN
    logits[1, 99] = NAN
    logits[2, 5] = INF
    logits[3] = -INF
    tokens = sample(logits.to(DEVICE), **tensors([{"temperature": temperature}] * 5)).tolist()
    assert tokens[:4] == [-1] * 4
    assert tokens[4] >= 0


def test_no_rows() -> None:
    assert sample(torch.empty(0, 10, device=DEVICE), **tensors([])).shape == (0,)


def test_draws_follow_the_probabilities() -> None:
    """Of 200 draws a token's share is within four standard deviations."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = [{}] * 200
    tokens = sample(probs.log().expand(200, -1).contiguous().to(DEVICE), **tensors(rows))
    shares = torch.bincount(tokens.cpu(), minlength=4) / 200
    assert bool(((shares - probs).abs() < 4 * (probs * (1 - probs) / 200).sqrt()).all())
