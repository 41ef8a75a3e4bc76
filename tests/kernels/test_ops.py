"""The choice of implementations by device."""

from __future__ import annotations

import sys

import pytest

from pdx.errors import ConfigError
from pdx.kernels.ops import ops_for


def test_devices_that_are_not_served_are_refused() -> None:
    assert not ops_for("cpu").keeps_float8
    for device in ("mps", ""):
        with pytest.raises(ConfigError, match="not served"):
            ops_for(device)


def test_a_gpu_has_the_kernels() -> None:
    for device in ("cuda", "cuda:1"):
        ops = ops_for(device)
        assert ops.keeps_float8
        assert ops.rope_kv_append.__module__ == "pdx.kernels.triton_ops"


def test_kernels_for_a_gpu_are_not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDX_KERNELS", "interpret")
    with pytest.raises(ConfigError, match="PDX_KERNELS=interpret is for ranks on a CPU"):
        ops_for("cuda")


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("pdx.kernels.")]:
        if name != "pdx.kernels.ops":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("pdx.kernels.triton_ops", raising=False)
    with pytest.raises(ConfigError, match="need Triton, which is not installed") as refused:
        ops_for("cuda")
    assert refused.value.hint == "pip install triton"
