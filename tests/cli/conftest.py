"""Commands that run in the tests' own process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """A command sets variables for its children; nodes of later tests must not inherit them."""
    with mock.patch.dict(os.environ):
        yield
