"""Bias and penalties: to the bit the reference's, and nothing else touched."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pdx.kernels import logit_rules as module
from pdx.kernels.logit_rules import apply_rules
from pdx.kernels.reference.logit_rules import apply_rules as reference
from pdx.request.request import SamplingParams
from pdx.runner.logit_rules import RULE_COLUMNS, LogitRules, rule_arrays
from tests.kernels.triton.cases import DEVICE

VOCAB = 50
PROMPT = [1, 2, 2, 8, 49]
#: Parameters, and the output so far; None: no rules.
ROWS: list[tuple[dict[str, object] | None, list[int]]] = [
    (None, []),
    ({"logit_bias": {3: 1.5, 7: -100.0}}, [3]),
    ({"repetition_penalty": 1.3}, [4, 4]),
    ({"repetition_penalty": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.1}, [2, 9] * 20),
    ({"repetition_penalty": 1e-30}, [11, 12]),
    ({"presence_penalty": -0.3, "logit_bias": {i: 0.1 * i for i in range(40)}}, [5, 5, 5, 48]),
    ({"min_tokens": 3, "stop_token_ids": (6, 6, 0)}, [1, 1]),
    ({"min_tokens": 3, "stop_token_ids": (6, 0)}, [1, 1, 1]),
]


def rules_of(params: dict[str, object] | None) -> LogitRules | None:
    if params is None:
        return None
    sampling = SamplingParams(max_tokens=99, **params)  # type: ignore[arg-type]
    return LogitRules.of(sampling, PROMPT, VOCAB)


def columns(rows: Sequence[tuple[LogitRules | None, Sequence[int]]]) -> list[Tensor]:
    arrays = rule_arrays(rows)
    return [arrays[name] for name in RULE_COLUMNS]


def test_rules_are_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 16)
    logits = torch.randn(len(ROWS), VOCAB) * 5
    logits[4] *= 1e10
    rules = [rules_of(params) for params, _ in ROWS]
    listed = columns([(each, out) for each, (_, out) in zip(rules, ROWS, strict=True)])
    on_device = logits.to(DEVICE, copy=True)
    changed = apply_rules(on_device, *(column.to(DEVICE) for column in listed))
    assert changed.data_ptr() == on_device.data_ptr()
    assert torch.equal(on_device.cpu(), reference(logits.clone(), *listed))
    assert bool((on_device[4].abs() <= torch.finfo(torch.float32).max).all())


def test_rows_may_lie_apart() -> None:
    rules = rules_of(ROWS[3][0])
    assert rules is not None
    on_host = columns([(rules, [2, 9])] * 2)
    listed = [column.to(DEVICE) for column in on_host]
    wide = torch.randn(2, VOCAB + 14).to(DEVICE)
    before = wide.cpu().clone()
    apply_rules(wide[:, :VOCAB], *listed)
    assert torch.equal(wide[:, VOCAB:].cpu(), before[:, VOCAB:])
    expected = reference(before[:, :VOCAB].clone(), *on_host)
    assert torch.equal(wide[:, :VOCAB].cpu(), expected)


def test_no_rows() -> None:
    logits = torch.empty(0, 10, device=DEVICE)
    listed = (torch.zeros(n, device=DEVICE) for n in (1, 0, 0, 0, 0, 0, 0))
    assert apply_rules(logits, *listed).shape == (0, 10)
