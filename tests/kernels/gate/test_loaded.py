"""What a GPU's driver loads has the gate's registers: the records are of what runs there."""

from __future__ import annotations

import pytest
import torch
import triton

from tests.kernels.gate.launches import Launch
from tests.kernels.gate.test_gate import LAUNCHES, RECORDED_WITH, _label, _recorded

HAS_GPU = torch.cuda.is_available()
ARCH = 10 * torch.cuda.get_device_capability()[0] if HAS_GPU else 90
OWN = [launch for launch, _ in LAUNCHES if launch.arch == ARCH]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="no GPU"),
    pytest.mark.skipif(
        not triton.__version__.startswith(RECORDED_WITH),
        reason=f"the records are of Triton {RECORDED_WITH}",
    ),
]


@pytest.mark.parametrize("launch", OWN, ids=map(_label, OWN))
def test_loaded_kernel_is_the_recorded_one(launch: Launch) -> None:
    compiled = triton.compile(launch.source, target=launch.target, options=launch.options.__dict__)
    compiled._init_handles()
    loaded = compiled.n_regs, compiled.n_spills
    assert loaded == (_recorded()[_label(launch)]["registers"], 0)
