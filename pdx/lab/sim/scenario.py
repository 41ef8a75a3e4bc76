"""What happens to a simulated cluster, drawn from a seed before anything runs. Pure.

Requests and faults are numbered, and each is drawn from the seed and its number alone: a scenario
with some of them left out is the same otherwise, which is what shrinking needs.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pdx.fabric import Provider
from pdx.lab.sim.clients import RequestPlan
from pdx.lab.sim.model import VOCAB_SIZE

__all__ = ["Fault", "FaultKind", "NodeShape", "Scenario", "ScenarioOptions", "draw_scenario"]

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000
#: Decoders with more prefillers to choose from are linked with so many of them.
_MAX_PEERS = 4
_NUM_KV_HEADS = 2
_Numbered = TypeVar("_Numbered", RequestPlan, "Fault")


class FaultKind(enum.StrEnum):
    """What can go wrong; each has its share of a history's faults."""

    #: A node is killed, and started again later.
    KILL = "kill"
    #: A node is stopped on purpose, and started again.
    RESTART = "restart"
    #: A rank of a node is killed: the node ends by itself, and is started again later.
    RANK = "rank"
    #: A node is stopped (SIGSTOP), and goes on later.
    PAUSE = "pause"
    #: Nothing gets from one node to another, control or data, either way or one way.
    PARTITION = "partition"
    #: Nothing gets out of one of a node's network cards; the others, if it has any, work.
    CARD = "card"
    #: A path is slow.
    SLOW = "slow"
    #: Writes overtake each other by far.
    REORDER = "reorder"
    #: Some writes' completions never come.
    LOSE = "lose"
    #: Completions come long after the bytes.
    LATE = "late"
    #: The network takes no writes for the moment.
    REFUSE = "refuse"
    #: Data connections are reset: writes reported good are lost, failed ones arrive.
    RESET = "reset"
    #: A control connection is reset, at both ends or at one.
    HANGUP = "hangup"
    #: An immediate of a slot's last transfer comes while the next one is under way.
    STRAY = "stray"
    #: A client leaves.
    ABORT = "abort"
    #: Nodes have few pages, so that requests wait, grow into each other and are preempted.
    PAGES = "pages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    number: int
    kind: FaultKind
    at_ns: int
    duration_ns: int
    #: A node (or for an abort a request's number), and the other end of a path.
    target: str
    other: str = ""
    #: How bad: a rate, a factor, or which variant; 0 to 1.
    strength: float = 0.5

    @property
    def end_ns(self) -> int:
        return self.at_ns + self.duration_ns

    def __str__(self) -> str:
        path = f"{self.target}-{self.other}" if self.other else self.target
        return f"{self.kind} {path} for {self.duration_ns / SECOND_NS:.3f} s ({self.strength:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """What one node is made of."""

    tp_size: int
    page_size: int
    num_pages: int
    chunk_len: int
    max_num_seqs: int
    reserve_output_len: int
    prefix_cache: bool
    local_below: int
    #: Network cards that it stripes its writes over.
    num_cards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOptions:
    """What the user chose."""

    num_prefillers: int = 2
    num_decoders: int = 1
    num_requests: int = 20
    num_faults: int = 5
    faults: tuple[FaultKind, ...] = tuple(FaultKind)
    #: Only these of the requests, and of the faults; None: all.
    only_requests: tuple[int, ...] | None = None
    only_faults: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All that a history needs besides the code."""

    seed: int
    options: ScenarioOptions
    provider: Provider
    #: Nodes by name: p0, p1 ... and d0, d1 ...
    nodes: dict[str, NodeShape]
    #: The prefillers of each decoder.
    peers: dict[str, tuple[str, ...]]
    num_kv_heads: int
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]
    #: Bits of an immediate for slot and generation.
    slot_bits: int

    @property
    def context_len(self) -> int:
        """Prompt and output tokens of one request, at most."""
        return 1024


def draw_scenario(seed: int, options: ScenarioOptions) -> Scenario:
    """The scenario of a seed."""
    is_small = options.num_prefillers + options.num_decoders <= 8
    prefillers = [f"p{i}" for i in range(options.num_prefillers)]
    decoders = [f"d{i}" for i in range(options.num_decoders)]
    rng = random.Random(f"{seed}/cluster")
    scarce = FaultKind.PAGES in options.faults and rng.random() < 0.5
    page_sizes = (rng.choice((2, 4, 8)), rng.choice((2, 4, 8)))
    if rng.random() < 0.6 or not is_small:
        page_sizes = (page_sizes[0], page_sizes[0])
    alike = {
        role: _draw_shape(rng, page_size, scarce=scarce, is_small=is_small)
        for role, page_size in zip("pd", page_sizes, strict=True)
    }
    reach = min(_MAX_PEERS, len(prefillers))
    numbers = range(options.num_requests)
    window_ns = (
        300 * MILLISECOND_NS if is_small else max(1, options.num_requests // 500) * SECOND_NS
    )
    requests = [_draw_request(seed, i, decoders, alike, window_ns) for i in numbers]
    kinds = [kind for kind in options.faults if kind is not FaultKind.PAGES]
    faults = [
        _draw_fault(seed, i, kinds, prefillers, decoders, requests)
        for i in range(options.num_faults if kinds else 0)
    ]
    return Scenario(
        seed=seed,
        options=options,
        provider=Provider.SHM if is_small and rng.random() < 0.25 else Provider.TCP,
        nodes={name: alike[name[0]] for name in (*prefillers, *decoders)},
        peers={
            name: tuple(prefillers[(i * reach + j) % len(prefillers)] for j in range(reach))
            for i, name in enumerate(decoders)
        },
        num_kv_heads=_NUM_KV_HEADS,
        requests=tuple(_only(requests, options.only_requests)),
        faults=tuple(_only(faults, options.only_faults)),
        slot_bits=2 if is_small else 12,
    )


def _only(drawn: Sequence[_Numbered], numbers: Collection[int] | None) -> list[_Numbered]:
    return [each for each in drawn if numbers is None or each.number in numbers]


def _draw_shape(rng: random.Random, page_size: int, *, scarce: bool, is_small: bool) -> NodeShape:
    if not is_small:
        return NodeShape(
            tp_size=1,
            page_size=16,
            num_pages=128,
            chunk_len=256,
            max_num_seqs=32,
            reserve_output_len=16,
            prefix_cache=True,
            local_below=0,
            num_cards=1,
        )
    # A request of the longest prompt and output still fits.
    fewest = -(-64 // page_size)
    return NodeShape(
        tp_size=rng.choice((1, 1, 1, 2, 4)),
        page_size=page_size,
        num_pages=rng.randint(fewest, 2 * fewest) if scarce else 6 * fewest,
        chunk_len=rng.choice((4, 8, 16, 32)),
        max_num_seqs=rng.randint(2, 6),
        reserve_output_len=rng.choice((1, 4, 16)),
        prefix_cache=rng.random() < 0.7,
        local_below=rng.choice((0, 0, 0, 3)),
        num_cards=rng.choice((1, 1, 1, 2, 3)),
    )


def _draw_request(
    seed: int, number: int, decoders: Sequence[str], shapes: dict[str, NodeShape], window_ns: int
) -> RequestPlan:
    rng = random.Random(f"{seed}/request/{number}")
    page, chunk = shapes["d"].page_size, shapes["p"].chunk_len
    lengths = (1, 2, page - 1, page, page + 1, 2 * page, chunk - 1, chunk, chunk + 1)
    length = rng.choice(lengths) if rng.random() < 0.5 else rng.randint(1, 44)
    # Prompts begin alike, so that caches hit: a few texts, cut anywhere.
    shared = random.Random(f"{seed}/text/{rng.randrange(3)}")
    num_shared = min(length, rng.choice((0, page, 2 * page, 3 * page, 24)))
    tokens = [shared.randrange(VOCAB_SIZE) for _ in range(num_shared)]
    tokens += [rng.randrange(VOCAB_SIZE) for _ in range(length - num_shared)]
    # A stop token that a text meets at random would need a vocabulary of a few.
    return RequestPlan(
        number=number,
        at_ns=rng.randrange(window_ns),
        decoder=rng.choice(decoders),
        token_ids=tuple(tokens or [7]),
        max_tokens=rng.choice((1, 2, 3, 4, 6, 8, 12)),
        cache_salt=rng.choice(("", "", "", "a")),
        prompt_logprobs=0 if rng.random() < 0.1 else None,
    )


def _draw_fault(
    seed: int,
    number: int,
    kinds: Sequence[FaultKind],
    prefillers: Sequence[str],
    decoders: Sequence[str],
    requests: Sequence[RequestPlan],
) -> Fault:
    rng = random.Random(f"{seed}/fault/{number}")
    kind = rng.choice(kinds)
    target = rng.choice((*prefillers, *decoders))
    ends = [rng.choice(prefillers), rng.choice(decoders)]
    rng.shuffle(ends)
    other = ""
    at_ns = rng.randrange(500 * MILLISECOND_NS)
    if kind in (
        FaultKind.PARTITION,
        FaultKind.CARD,
        FaultKind.SLOW,
        FaultKind.RESET,
        FaultKind.HANGUP,
    ):
        target, other = ends
    if kind is FaultKind.ABORT and requests:
        request = rng.choice(requests)
        target = str(request.number)
        # From 10 us to 200 ms after it came, each step as likely.
        at_ns = request.at_ns + int(10 ** rng.uniform(4, 8.3))
    # Short ones and ones that outlast every timeout.
    seconds = rng.choice((0.002, 0.02, 0.2, 1.0, 4.0))
    return Fault(
        number=number,
        kind=kind,
        at_ns=at_ns,
        duration_ns=int(rng.uniform(0.5, 1.5) * seconds * SECOND_NS),
        target=target,
        other=other,
        strength=rng.random(),
    )
