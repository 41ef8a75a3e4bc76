"""A decoder that speaks the protocol and asks for nonsense: refused by name, and nothing else."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
from pathlib import Path

import pytest

from pdx.checkpoint.layers import full_attention
from pdx.engine.peer import PeerConnector
from pdx.errors import RequestError
from pdx.fabric import FabricOptions, MemoryPart
from pdx.kv.pages import Proof
from pdx.messenger.actions import PrefillTimes
from pdx.messenger.control import parse_address
from pdx.messenger.decode_link import Arrival, DecodeLink
from pdx.messenger.fabric_hub import FabricHub, MappedMemory
from pdx.messenger.handshake import NodeIdentity
from pdx.messenger.manifest import Manifest, model_id, text_id
from pdx.messenger.messages import Prefill
from pdx.messenger.slots import SlotTable
from pdx.metrics.faults import Fault
from pdx.request.batch import ScoredToken
from pdx.request.ids import IdArray
from tests.system.nodes import Prefiller

LAYERS, PAGE, PAGES = 3, 16, 8
PAGE_BYTES = 2 * 2 * PAGE * 32 * 4


class Recorder:
    """The engine's place: notes what the link says."""

    def __init__(self) -> None:
        self.outcome: asyncio.Queue[RequestError | None] = asyncio.Queue()

    def transfer_settled(self, link: DecodeLink, transfer_id: int, proof: Proof) -> None:
        pass

    def prefix_found(self, link: DecodeLink, transfer_id: int, num_tokens: int) -> None:
        pass

    def transfer_counted(self, link: DecodeLink, transfer_id: int, arrival: Arrival) -> None:
        pass

    def prompt_scored(self, link: DecodeLink, transfer_id: int, tokens: list[ScoredToken]) -> None:
        pass

    def prefill_times(self, link: DecodeLink, times: PrefillTimes) -> None:
        pass

    def transfer_ready(self, link: DecodeLink, transfer_id: int) -> None:
        self.outcome.put_nowait(None)

    def transfer_lost(
        self, link: DecodeLink, transfer_id: int, error: RequestError, fault: Fault | None
    ) -> None:
        self.outcome.put_nowait(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": IdArray([1, 999_999])}, "token id 999999 is outside"),
        ({"token_ids": IdArray([2**32 - 1])}, "token id 4294967295 is outside"),
        ({"prompt_logprobs": 10**9, "last_token_id": 1}, "prompt_logprobs must be"),
        ({"prompt_logprobs": 1, "last_token_id": 512}, "token id 512 is outside"),
        ({"prompt_logprobs": 1, "last_token_id": -1}, "token id -1 is outside"),
        ({"page_indices": IdArray([PAGES])}, "destination pages"),
        ({"atoms_by_rank": [LAYERS + 1]}, "the plan has"),
    ],
)
async def test_nonsense_is_refused_and_the_prefiller_goes_on(
    any_prefiller: Prefiller, tiny_llama: Path, change: dict[str, object], message: str
) -> None:
    memory = mmap.mmap(-1, LAYERS * PAGES * PAGE_BYTES + 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    eventfd = os.eventfd(0)
    hub = FabricHub(
        MappedMemory(
            kv_parts=(MemoryPart(address=address, num_bytes=LAYERS * PAGES * PAGE_BYTES),),
            progress_addresses=(address + LAYERS * PAGES * PAGE_BYTES,),
            progress_eventfds=(eventfd,),
        ),
        FabricOptions(),
    )
    manifest = Manifest(
        weights_id=model_id(tiny_llama),
        text_id=text_id(tiny_llama),
        layer_groups=(full_attention(LAYERS),),
        num_kv_heads=2,
        head_dim=32,
        dtype="float32",
        page_size=PAGE,
        tp_size=1,
        kv_layout="head-major",
        num_pages=PAGES,
    )
    identity = NodeIdentity(node="wrong", manifest=manifest, fabric="tcp")
    slots, engine = SlotTable(), Recorder()
    connector = PeerConnector(
        parse_address(any_prefiller.address), hub, slots, identity, owner=engine
    )
    await connector.connect_once()
    assert connector.link is not None
    try:
        for transfer_id, fields in ((1, change), (2, {})):
            slot, generation = slots.take() or (0, 0)
            ask: dict[str, object] = {
                "token_ids": IdArray([1]),
                "page_indices": IdArray([0]),
                "atoms_by_rank": [LAYERS],
            } | fields
            connector.link.start_transfer(
                Prefill(
                    transfer_id=transfer_id,
                    first_position=0,
                    slot=slot,
                    generation=generation,
                    **ask,  # type: ignore[arg-type]
                )
            )
            outcome = await engine.outcome.get()
            if fields:
                assert outcome is not None
                assert message in outcome.message
                assert outcome.http_status == 400
            else:
                assert outcome is None, "an ordinary transfer is served afterwards"
    finally:
        await connector.stop("the test ends", None)
        hub.close()
        os.close(eventfd)
