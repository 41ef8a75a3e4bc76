"""A running node pair per fabric, and the colocated engine as the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from pdx import LLM, SamplingParams
from pdx.fabric import open_fabric
from tests.system.cluster import Cluster
from tests.system.nodes import Decoder, Prefiller, decoder, prefiller


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs all tests with nodes: they share them, and their bounds assume the cores."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("nodes"))


@pytest.fixture(scope="session", autouse=True)
def swept_shared_memory() -> Iterator[None]:
    """What nodes leave in /dev/shm that tests kill goes as it does for users: with the next fabric
    over shm.
    """
    yield
    open_fabric(provider="shm").close()


class Generate(Protocol):
    """The colocated engine's token ids, greedy unless sampling parameters are given."""

    def __call__(self, prompt: list[int], num_tokens: int, **sampling: Any) -> list[int]: ...


@dataclass(frozen=True)
class Pair:
    """A prefiller and its decoder."""

    prefiller: Prefiller
    decoder: Decoder
    provider: str


@pytest.fixture(scope="session", params=["tcp", "shm"])
def pair(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """One pair for all tests that leave it as they found it."""
    logs = tmp_path_factory.mktemp(f"pair-{request.param}")
    fabric = ["--fabric", request.param, "--kv-memory", "16M"]
    with (
        prefiller(tiny_llama, logs / "prefill.log", *fabric) as prefill_node,
        decoder(prefill_node.address, logs / "decode.log", *fabric) as decode_node,
    ):
        yield Pair(prefill_node, decode_node, request.param)


@pytest.fixture(scope="session", params=["tcp", "shm"])
def session_cluster(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Nodes for tests that break them."""
    logs = tmp_path_factory.mktemp(f"cluster-{request.param}")
    with contextlib.closing(Cluster(tiny_llama, logs, request.param)) as cluster:
        yield cluster


@pytest.fixture
def cluster(session_cluster: Cluster) -> Cluster:
    """Whole, connected and clean at the test's start."""
    session_cluster.heal()
    return session_cluster


@pytest.fixture(scope="session")
def any_prefiller(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prefiller]:
    """One prefiller on whatever fabric its decoders offer, for tests that leave it well."""
    log = tmp_path_factory.mktemp("prefiller") / "prefill.log"
    with prefiller(tiny_llama, log, "--kv-memory", "16M") as node:
        yield node


@pytest.fixture(scope="session")
def colocated(tiny_llama: Path) -> Iterator[Generate]:
    """Token ids of the colocated engine with the same chunks and pages, EOS ignored."""
    with LLM(
        tiny_llama,
        dtype="float32",
        page_size=16,
        chunk_len=64,
        kv_memory_bytes=16 << 20,
        num_threads=1,
        poison=True,
        prefix_cache=False,
    ) as llm:

        def generate(prompt: list[int], num_tokens: int, **sampling: Any) -> list[int]:
            fields = {"temperature": 0.0, **sampling, "max_tokens": num_tokens}
            [output] = llm.generate([prompt], SamplingParams(**fields), ignore_eos=True)
            return output.token_ids

        yield generate
