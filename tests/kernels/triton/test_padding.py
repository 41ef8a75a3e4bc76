"""Places of a captured graph's batch that no request has: nothing of theirs is read or written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pdx.kernels.batch import RequestGroup
from pdx.kernels.mla_decode import mla_decode
from pdx.kernels.mla_decode_float8 import mla_decode_float8
from pdx.kernels.mla_prefill import mla_prefill
from pdx.kernels.paged_decode import paged_decode
from pdx.kernels.paged_prefill import paged_prefill
from pdx.kernels.reference.mla_record import pack_records
from tests.kernels.triton.cases import DEVICE, PagedCase

BF16 = torch.bfloat16
#: R and E.
LATENT, ROPE = 64, 16


def padded(group: RequestGroup, real: int) -> RequestGroup:
    """The first ``real`` requests, and one unused place before and two behind. What is not theirs
    in the arrays points where nothing is."""

    def around(values: Tensor, value: int) -> Tensor:
        outside = values.new_tensor([value])
        return torch.cat([outside, values[:real], outside, outside])

    return replace(
        group,
        query_starts=around(group.query_starts, 10**6),
        query_lens=around(group.query_lens, 0),
        seq_lens=around(group.seq_lens, 0),
        seq_starts=around(group.seq_starts, 10**6),
        table_starts=around(group.table_starts, 10**6),
    )


def heads(attend: Callable[..., Tensor], **options: int) -> Callable[..., Tensor]:
    def run(case: PagedCase, group: RequestGroup, num_rows: int) -> Tensor:
        kv, q = case.heads(2, 64, BF16), torch.randn(num_rows, 4, 64, dtype=BF16)
        return attend(q.to(DEVICE), kv.to(DEVICE, BF16), group, 0.1, **options)

    return run


def latents(num_splits: int) -> Callable[..., Tensor]:
    def run(case: PagedCase, group: RequestGroup, num_rows: int) -> Tensor:
        kv = case.latents(LATENT + ROPE, BF16)
        q = torch.randn(num_rows, 16, LATENT + ROPE, dtype=BF16)
        return mla_decode(
            q.to(DEVICE), kv.to(DEVICE, BF16), group, 0.1, LATENT, num_splits=num_splits
        )

    return run


def records(case: PagedCase, group: RequestGroup, num_rows: int) -> Tensor:
    flat = case.latents(LATENT + ROPE, torch.float32).flatten(0, 1)
    packed = pack_records(flat[:, :LATENT], flat[:, LATENT:]).view(case.num_pages, 16, -1)
    q = torch.randn(num_rows, 16, LATENT + ROPE, dtype=BF16)
    return mla_decode_float8(q.to(DEVICE), packed.to(DEVICE), group, 0.1, LATENT, num_splits=2)


def expanded(case: PagedCase, group: RequestGroup, num_rows: int) -> Tensor:
    total = sum(map(sum, case.requests))
    q, keys = torch.randn(num_rows, 2, 48, dtype=BF16), torch.randn(total, 2, 64, dtype=BF16)
    k_rope = torch.randn(total, 16, dtype=BF16).to(DEVICE)
    k_nope, v = keys.to(DEVICE).split(32, dim=2)
    return mla_prefill(q.to(DEVICE), k_nope, k_rope, v, group, 0.1)


@pytest.mark.parametrize(
    ("run", "requests"),
    [
        (heads(paged_decode, num_splits=1), [(20, 2), (3, 2)]),
        (heads(paged_decode, num_splits=2), [(70, 1), (3, 1)]),
        (heads(paged_prefill), [(20, 30), (3, 2)]),
        (latents(1), [(20, 1), (3, 1)]),
        (latents(3), [(20, 1), (3, 1)]),
        (records, [(20, 1), (3, 1)]),
        (expanded, [(0, 30), (3, 2)]),
    ],
    ids=[
        "decode",
        "decode in parts",
        "prefill",
        "latents",
        "latents in parts",
        "records",
        "mla prefill",
    ],
)
def test_unused_places_touch_nothing(
    run: Callable[..., Tensor], requests: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    case = PagedCase(requests, 16)
    torch.manual_seed(1)
    whole = run(case, case.group, case.num_tokens)
    torch.manual_seed(1)
    out = run(case, padded(case.group, 1), case.num_tokens)
    own = requests[0][1]
    assert torch.equal(out[:own], whole[:own])
    assert bool(whole.isfinite().all())
    assert bool(out[own:].isnan().all())
