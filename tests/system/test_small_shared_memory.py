"""A /dev/shm that is too small, as containers have it: auto takes tcp and says why, shm is refused;
what is said before a start is what happens at it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fabric.faults.network import lacks
from tests.system.conftest import Generate
from tests.system.nodes import (
    end,
    prefiller,
    read_announcement,
    run_to_end,
    start,
)
from tests.system.prompts import prompt_of

KV = ["--kv-memory", "16M"]
MIB = 1 << 20
#: libfabric itself offers no shm in the first; in the last a link fits.
SIZES = (8 * MIB, 14 * MIB, 64 * MIB)


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size // MIB}M")
def shared_memory(request: pytest.FixtureRequest) -> Iterator[tuple[int, list[str]]]:
    """Its size, and the command that puts another into the mount namespace that has it."""
    if lack := lacks():
        pytest.skip(lack)
    size: int = request.param
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm; echo; exec sleep infinity"
    holder = subprocess.Popen(["unshare", "--mount", "sh", "-ec", mount], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder.stdout:
        holder.stdout.readline()
        yield size, ["nsenter", "--mount", "--target", str(holder.pid)]
        holder.kill()
        holder.wait()


def choice_of(within: list[str]) -> list[str]:
    """What `pdx inspect fabric` says would be tried between two nodes of this host."""
    command = [*within, sys.executable, "-m", "pdx", "inspect", "fabric", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    providers: list[str] = json.loads(found)["choices"][0]["providers"]
    return providers


def test_auto_takes_the_best_that_works_and_inspect_says_the_same(
    shared_memory: tuple[int, list[str]],
    tiny_llama: Path,
    tmp_path: Path,
    colocated: Generate,
    tiny_prompt_ids: list[int],
) -> None:
    size, within = shared_memory
    best, *_ = choice_of(within)
    assert best == ("shm" if size > 16 * MIB else "tcp")
    log = tmp_path / "prefill.log"
    with prefiller(tiny_llama, log, *KV, within=within) as source:
        node = start(["decode", "--peer", source.address, *KV], tmp_path / "log", None, within)
        try:
            url = read_announcement(node, r"http://\S+/v1")
            said = node.stderr()
            assert f"connected to {source.address} ({best})" in said
            warned = [line for line in said.splitlines() if "/dev/shm has" in line]
            assert len(warned) == (best == "tcp"), said
            prompt = prompt_of(tiny_prompt_ids, 40)
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            body |= {"return_token_ids": True}
            answer = httpx.post(f"{url}/completions", json=body, timeout=30).json()
            assert answer["choices"][0]["token_ids"] == colocated(prompt, 4)
        finally:
            end(node)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("check", [["--check"], []], ids=["check", "start"])
def test_shm_that_cannot_be_is_refused_with_its_size_and_what_is_needed(
    shared_memory: tuple[int, list[str]],
    role: str,
    check: list[str],
    tiny_llama: Path,
    tmp_path: Path,
) -> None:
    size, within = shared_memory
    command = [role, "--model", str(tiny_llama), "--fabric", "shm", *KV, *check]
    if role == "decode":
        command += ["--peer", "127.0.0.1:1", "--peer-timeout", "0"]
    if size > 16 * MIB and not check:
        return  # it starts: the test above has one
    code, _, said = run_to_end(command, tmp_path / "log", timeout_s=20, within=within)
    if size > 16 * MIB:
        assert code == 0, said
        return
    assert code == 1  # --check ends as the start that it stands for
    assert "--fabric shm cannot be used here: /dev/shm has" in said
    assert f"of {size / MIB:.1f} MiB free, a link over shm may need 16.0 MiB" in said
    assert check or "hint: make it larger: docker run --shm-size" in said
