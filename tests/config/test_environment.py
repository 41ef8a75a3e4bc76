"""Variables that nothing reads are found, and all that are read are known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdx.config.environment import OTHER_VARIABLES, unknown_variables
from pdx.config.resolve import all_settings

ROOT = Path(__file__).parents[2]
KNOWN = {each.env for each in all_settings()} | set(OTHER_VARIABLES)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("PDX_KV_MEMROY", "PDX_KV_MEMORY"),
        ("PDX_KVMEMORY", "PDX_KV_MEMORY"),
        ("PDX_LOGLEVEL", "PDX_LOG_LEVEL"),
        ("pdx_secret", "PDX_SECRET"),
        ("PDX_LIB_FABRIC", "PDX_LIBFABRIC"),
        ("PDX_MODELS", "PDX_MODEL"),
        ("PDX_XYLOPHONES_AND_OTHERS", None),
    ],
)
def test_a_variable_that_nothing_reads_is_found_with_its_nearest(
    name: str, nearest: str | None
) -> None:
    assert unknown_variables({name: "1", "PDX_PAGES": "3", "HOME": "/"}) == {name: nearest}


def test_known_variables_and_those_of_others_are_left_alone() -> None:
    others = {"HF_HOME": "/", "HF_TOKEN": "x", "COLUMNS": "80", "_PDX_COMPLETE": "source_bash"}
    assert unknown_variables(dict.fromkeys(KNOWN, "1") | others) == {}


def test_what_kubernetes_sets_for_a_service_is_left_alone() -> None:
    env = {
        "PDX_PORT": "tcp://10.0.0.1:8000",
        "PDX_SERVICE_HOST": "10.0.0.1",
        "PDX_SERVICE_PORT": "8000",
        "PDX_DECODE_SERVICE_HOST": "10.0.0.2",
        "PDX_DECODE_SERVICE_PORT_HTTP": "8000",
        "PDX_DECODE_PORT": "tcp://10.0.0.2:8000",
        "PDX_DECODE_PORT_8000_TCP": "tcp://10.0.0.2:8000",
        "PDX_DECODE_PORT_8000_TCP_ADDR": "10.0.0.2",
        "PDX_DECODE_PORT_8000_TCP_PROTO": "tcp",
        "PDX_DECODE_PORT_8000_TCP_PORT": "8000",
    }
    assert unknown_variables(env) == {}
    assert unknown_variables({"PDX_PORT": "8000"}) != {}


def test_every_variable_that_the_code_reads_is_known() -> None:
    named = set()
    for file in (ROOT / "pdx").rglob("*"):
        if file.suffix in (".py", ".cpp", ".hpp"):
            quoted = re.findall(r"[\"'](PDX_[A-Z][A-Z0-9_]*)[\"']", file.read_text("utf-8"))
            named |= set(quoted)
    assert {"PDX_FAULT", "PDX_LIBFABRIC", "PDX_CONFIG"} <= named
    assert named <= KNOWN
