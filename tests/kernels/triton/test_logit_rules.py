"""Bias and penalties: the reference's and the rank's logits, in place, and nothing else touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdx.kernels import logit_rules as module
from pdx.kernels.logit_rules import RuleTensors, apply_rules
from pdx.kernels.reference.logit_rules import apply_rules as reference
from pdx.request.request import SamplingParams
from pdx.runner.logit_rules import LogitRules
from tests.kernels.triton.cases import DEVICE

Rule = tuple[int, float, bool, int, bool]
#: Of each row: rules, and the three penalties.
ROWS: list[tuple[list[Rule], tuple[float, float, float]]] = [
    ([], (1.0, 0.0, 0.0)),
    ([(3, 1.5, False, 0, False), (7, -100.0, False, 0, False)], (1.0, 0.0, 0.0)),
    ([(0, 0.0, True, 0, False), (5, 0.0, True, 2, False)], (1.3, 0.0, 0.0)),
    ([(n, 0.25, True, n % 4, n == 9) for n in range(40)], (0.7, 0.5, 0.25)),
    ([(11, 0.0, True, 1, False), (12, 0.0, True, 1, False)], (1e-30, 0.0, 0.0)),
]


def tensors(rows: list[tuple[list[Rule], tuple[float, float, float]]]) -> RuleTensors:
    rules = [rule for row, _ in rows for rule in row]
    lengths = torch.tensor([0, *(len(row) for row, _ in rows)])
    penalties = torch.tensor([penalty for _, penalty in rows]).view(-1, 3)
    counts = [count if count else -1 if seen else -2 for _, _, seen, count, _ in rules]
    return RuleTensors(
        starts=lengths.cumsum(0).to(DEVICE, torch.int32),
        token_ids=torch.tensor([rule[0] for rule in rules], dtype=torch.int32, device=DEVICE),
        bias=torch.tensor([rule[1] for rule in rules], device=DEVICE),
        counts=torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        held=torch.tensor([rule[4] for rule in rules], dtype=torch.bool, device=DEVICE),
        repetition=penalties[:, 0].contiguous().to(DEVICE),
        presence=penalties[:, 1].contiguous().to(DEVICE),
        frequency=penalties[:, 2].contiguous().to(DEVICE),
    )


def test_rules_are_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 16)
    logits = torch.randn(len(ROWS), 50) * 1e10
    logits[:4] /= 1e10
    expected = torch.stack(
        [reference(row, *case) for row, case in zip(logits, _cases(), strict=True)]
    )
    on_device = logits.to(DEVICE, copy=True)
    assert apply_rules(on_device, tensors(ROWS)).data_ptr() == on_device.data_ptr()
    torch.testing.assert_close(on_device.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert bool((on_device[4].abs() <= torch.finfo(torch.float32).max).all())


def _cases() -> list[tuple[list[Rule], float, float, float]]:
    return [(rules, *penalties) for rules, penalties in ROWS]


def test_rules_are_the_ranks() -> None:
    """As a rank has them: prompt and output ids, a bias, stop tokens before min_tokens."""
    sampling = SamplingParams(
        max_tokens=9,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={2: 3.0, 4: -1.0},
        min_tokens=5,
        stop_token_ids=(6,),
    )
    prompt, output = [1, 2, 2, 8], [4, 4, 9]
    rules = LogitRules.of(sampling, prompt, 20)
    assert rules is not None
    logits = torch.randn(20)
    listed: list[Rule] = [
        (
            token,
            sampling.logit_bias.get(token, 0.0),
            token in prompt + output,
            output.count(token),
            token == 6,
        )
        for token in (1, 2, 4, 6, 8, 9)
    ]
    found: Tensor = apply_rules(
        logits[None].to(DEVICE, copy=True), tensors([(listed, (1.2, 0.4, 0.3))])
    )
    torch.testing.assert_close(found[0].cpu(), rules.apply(logits, output), rtol=1e-6, atol=1e-6)


def test_no_rows() -> None:
    logits = torch.empty(0, 10, device=DEVICE)
    assert apply_rules(logits, tensors([])).shape == (0, 10)
