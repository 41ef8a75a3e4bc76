"""What does not fit a host is refused with what is asked, what is there, and what would fit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.config.setting import parse_bytes
from pdx.errors import ConfigError
from pdx.host.memory_room import MemoryFacts, MemoryLimit, MemoryNeed, check_memory

GIB = 1 << 30


def host(*free: int, process: int | None = None, file: int | None = None) -> MemoryFacts:
    limits = [MemoryLimit(name=f"limit {i}", free_bytes=each) for i, each in enumerate(free)]
    return MemoryFacts(shared=tuple(limits), process_bytes=process, file_bytes=file)


def need(*, nodes: int = 1, ranks: int = 1, weights: int = GIB, kv: int = GIB) -> MemoryNeed:
    return MemoryNeed(num_nodes=nodes, num_ranks=ranks, weight_bytes=weights, kv_bytes=kv)


def refusal(need: MemoryNeed, facts: MemoryFacts) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        check_memory(need, facts)
    assert refused.value.exit_code == 1
    return refused.value


def test_what_just_fits_is_taken() -> None:
    check_memory(need(), host(2 * GIB))
    check_memory(need(nodes=2, ranks=2), host(8 * GIB))
    check_memory(need(kv=1 << 60), host())  # nothing is known


def test_the_numbers_are_told() -> None:
    error = refusal(need(kv=40 * GIB), host(23 * GIB))
    assert "this node takes 41.0 GiB of memory" in error.message
    assert "1.0 GiB of weights and 40.0 GiB of KV cache" in error.message
    assert "23.0 GiB of limit 0 is free" in error.message
    assert "--kv-memory 20275M would fit" in str(error.hint)


def test_the_tightest_limit_is_named() -> None:
    assert "of limit 1 is free" in refusal(need(), host(4 * GIB, GIB, 3 * GIB)).message


def test_two_nodes_take_it_twice() -> None:
    check_memory(need(), host(3 * GIB))
    error = refusal(need(nodes=2), host(3 * GIB))
    assert "2 nodes on this host take 4.0 GiB" in error.message
    assert "in 2 ranks" in error.message


def test_weights_that_do_not_fit_have_no_cache_to_propose() -> None:
    error = refusal(need(weights=8 * GIB), host(4 * GIB))
    assert "not even the weights fit" in str(error.hint)


def test_limits_of_a_process_and_of_a_file() -> None:
    assert "RLIMIT_AS" in refusal(need(), host(9 * GIB, process=GIB + 1)).message
    # The primary maps the KV memory of all ranks.
    assert "RLIMIT_AS" in refusal(need(ranks=4), host(9 * GIB, process=3 * GIB)).message
    assert "RLIMIT_FSIZE" in refusal(need(), host(9 * GIB, file=GIB - 1)).message
    check_memory(need(ranks=4), host(9 * GIB, process=4 * GIB, file=GIB))


sizes = st.integers(0, 1 << 44)


@given(
    free=st.lists(sizes, min_size=1, max_size=3),
    process=st.none() | sizes,
    file=st.none() | sizes,
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 8),
    weights=sizes,
    kv=sizes,
)
def test_what_is_proposed_fits(
    free: list[int],
    process: int | None,
    file: int | None,
    nodes: int,
    ranks: int,
    weights: int,
    kv: int,
) -> None:
    """Followed once for each limit that is hit, the hints end in what is taken."""
    facts = host(*free, process=process, file=file)
    for _ in range(4):
        asked = need(nodes=nodes, ranks=ranks, weights=weights, kv=kv)
        try:
            check_memory(asked, facts)
            return
        except ConfigError as error:
            hint = error.hint or ""
        proposed = re.match(r"--kv-memory (\d+M) ", hint)
        if proposed is None:
            assert "not even the weights" in hint or "raise the limit" in hint
            return
        assert parse_bytes(proposed[1]) < kv
        kv = parse_bytes(proposed[1])
    raise AssertionError(f"no proposal was good: {facts}")
