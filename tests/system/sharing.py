"""A decoder with several prefillers, and what must hold of each: tokens, and exactly the bytes that
the decoder lacks, whoever has the first pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.oracle.transformers_oracle import Oracle
from tests.system.nodes import Decoder, Prefiller, decoder, prefiller, wait_until
from tests.system.prompts import prompt_of

__all__ = [
    "DECODER_PAGES",
    "HOLDERS",
    "LENGTHS",
    "LOCAL_BELOW",
    "NUM_TOKENS",
    "PAGE",
    "PROBES",
    "TOKEN_BYTES",
    "Cluster",
    "Shape",
    "cluster_of",
]

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 49, 64, 65, 66, 100, 200)
NUM_TOKENS = 16
#: The decoder's.
PAGE, LOCAL_BELOW, DECODER_PAGES = 16, 12, 48
#: KV of one token over all layers of the tiny model, which has 2 KV heads.
TOKEN_BYTES, NUM_KV_HEADS = 3 * 2 * 2 * 32 * 4, 2
#: Who has pages of the prompt that was asked before.
HOLDERS = ("prefiller", "decoder", "both")
#: What is asked after a prompt of five pages: how many of them it shares, how many are new.
PROBES = {"again": (5, 0), "longer": (5, 3), "parting": (2, 4)}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a prefiller is started."""

    tp_size: int = 1
    page_size: int = PAGE
    chunk: int = 64

    def __str__(self) -> str:
        return f"tp {self.tp_size}, page {self.page_size}, chunk {self.chunk}"


@dataclass(frozen=True)
class Cluster:
    """A decoder and its prefillers, in the order of its peers."""

    prefillers: Sequence[Prefiller]
    shapes: Sequence[Shape]
    decoder: Decoder
    decode_tp: int
    oracle: Oracle
    prompt_ids: list[int]

    def ask(self, prompt: list[int], **fields: Any) -> tuple[Any, Any]:
        """A completion's body and timeline; its tokens are the oracle's."""
        body = self.decoder.post(prompt, NUM_TOKENS, **fields).json()
        wanted = self.oracle.greedy(prompt, NUM_TOKENS)
        assert wanted.agrees_with(body["choices"][0]["token_ids"]), len(prompt)
        return body, self.decoder.timeline(body["id"])

    def steer(self, prefiller: Prefiller) -> None:
        """Make this prefiller the next in turn."""
        before = self.prefillers[self.prefillers.index(prefiller) - 1]
        for _ in self.prefillers:
            body = self.decoder.post([1] * (LOCAL_BELOW + 1), 1).json()
            if self.decoder.timeline(body["id"])["prefiller"] == before.address:
                return
        raise AssertionError("the prefillers do not take turns")

    def make_decoder_forget(self) -> None:
        """Have it evict every page that it keeps; the prefillers have room for more."""
        for shift in range(2):
            self.decoder.post(prompt_of(self.prompt_ids, DECODER_PAGES * PAGE // 2, shift), 1)

    def bytes_between(self, shape: Shape, first: int, stop: int) -> int:
        """What a prefiller writes for positions ``first <= i < stop``."""
        run = math.gcd(PAGE, shape.page_size)
        copies = max(1, self.decode_tp // NUM_KV_HEADS)
        return (-(-stop // run) - first // run) * run * TOKEN_BYTES * copies

    def check_lengths(self) -> None:
        """Every length gives the oracle's tokens; all prefillers take their turns."""
        shape_of = {p.address: s for p, s in zip(self.prefillers, self.shapes, strict=True)}
        takers = []
        for length in LENGTHS:
            _, timeline = self.ask(prompt_of(self.prompt_ids, length))
            taker = timeline["prefiller"]
            if length <= LOCAL_BELOW:
                assert taker is None
                continue
            wanted = self.bytes_between(shape_of[taker], 0, length - 1)
            assert timeline["transfer_bytes"] == wanted, length
            takers.append(taker)
        num = len(self.prefillers)
        assert set(takers[:num]) == set(shape_of), "idle prefillers take turns"
        assert takers[num:] == takers[:-num]
        self.wait_clean()

    def check_prefix(self, idx: int, holder: str, probe: str) -> None:
        """One of the prefillers, the decoder, or both have the first pages of a prompt."""
        num_same, num_new = PROBES[probe]
        node, shape = self.prefillers[idx], self.shapes[idx]
        salt = f"{idx} {holder} {probe}"
        seed = prompt_of(self.prompt_ids, 5 * PAGE + 1)
        fresh = prompt_of(self.prompt_ids, num_new * PAGE + 1, shift=100)[1:]
        prompt = [*seed[: num_same * PAGE], *fresh, 7]
        self.steer(node)
        _, seeded = self.ask(seed, cache_salt=salt)
        assert seeded["prefiller"] == node.address
        if holder == "prefiller":
            self.make_decoder_forget()
        if holder != "decoder":
            self.steer(node)
        body, timeline = self.ask(prompt, cache_salt=salt)

        on_decoder = 0 if holder == "prefiller" else num_same * PAGE
        num_tokens = (num_same + num_new) * PAGE
        is_there = on_decoder == num_tokens
        taker = timeline["prefiller"]
        if is_there:
            assert taker is None and timeline["transfer_bytes"] == 0
        else:
            assert (taker == node.address) == (holder != "decoder" or len(self.prefillers) == 1)
            taken_by = next(
                s for p, s in zip(self.prefillers, self.shapes, strict=True) if p.address == taker
            )
            wanted = self.bytes_between(taken_by, on_decoder, num_tokens)
            assert timeline["transfer_bytes"] == wanted
        # Whole pages of the prefiller's; it computes one token at least.
        on_prefiller = (num_same * PAGE - (num_new == 0)) // shape.page_size * shape.page_size
        known = max(on_decoder, on_prefiller if holder != "decoder" and not is_there else 0)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == known
        self.decoder.wait_clean()

    def wait_clean(self) -> None:
        """Every node has its pages back."""
        self.decoder.wait_clean()
        for node in self.prefillers:
            node.wait_clean()


@contextmanager
def cluster_of(
    shapes: Sequence[Shape],
    decode_tp: int,
    model: Path,
    oracle: Oracle,
    prompt_ids: list[int],
    logs: Path,
) -> Iterator[Cluster]:
    """Start the nodes and wait until all are connected."""
    with ExitStack() as stack:
        nodes = []
        for idx, shape in enumerate(shapes):
            options = ["--kv-memory", "16M", "--tp", str(shape.tp_size)]
            options += ["--page-size", str(shape.page_size), "--chunk", str(shape.chunk)]
            starting = prefiller(model, logs / f"prefill-{idx}.log", *options)
            nodes.append(stack.enter_context(starting))
        addresses = ",".join(node.address for node in nodes)
        options = ["--tp", str(decode_tp), "--page-size", str(PAGE)]
        options += ["--pages", str(DECODER_PAGES), "--local-below", str(LOCAL_BELOW)]
        node = stack.enter_context(decoder(addresses, logs / "decode.log", *options))
        wait_until(
            lambda: node.counts()["prefillers"] == len(nodes), timeout_s=30, what="all are there"
        )
        yield Cluster(nodes, shapes, node, decode_tp, oracle, prompt_ids)
