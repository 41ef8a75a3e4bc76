"""The choice of implementations by device."""

from __future__ import annotations

import pytest

from pdx.errors import ConfigError
from pdx.kernels.ops import ops_for


def test_devices_that_are_not_served_are_refused() -> None:
    ops_for("cpu")
    for device in ("cuda", "cuda:0", "mps", ""):
        with pytest.raises(ConfigError, match="not served"):
            ops_for(device)
