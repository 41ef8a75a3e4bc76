"""The nodes of a simulated cluster: the real engine, scheduler, messenger and KV pools, put on a
simulated room's loop, network and ranks.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pdx.checkpoint.model import Family, ModelConfig
from pdx.checkpoint.rope import RopeConfig
from pdx.config.engine import EngineConfig
from pdx.config.node import ServerConfig
from pdx.config.providers import FabricChoice
from pdx.engine.decode_node import DecodeNode
from pdx.engine.loading import LoadedModel
from pdx.engine.prefill_node import PrefillNode
from pdx.fabric import Fabric, FabricOptions, Provider
from pdx.kv.layout import KvLayout, NodeLayout, kv_heads_of_rank
from pdx.lab.sim.clients import SimulatedFrontend
from pdx.lab.sim.loop import Process, VirtualLoop
from pdx.lab.sim.model import VOCAB_SIZE, SimulatedModel
from pdx.lab.sim.ranks import PassTimes, SimulatedMemory, SimulatedRanks
from pdx.lab.sim.scenario import NodeShape, Scenario
from pdx.lab.sim.watch import Watch, WatchedPool, WatchedSlots
from pdx.lab.sim.wire import ControlNetwork, Listener
from pdx.lab.simulated_fabric import SimulatedFabric, SimulatedNetwork
from pdx.messenger.control import Address
from pdx.request.stream import NodeStatus
from pdx.scheduler.scheduler import Scheduler, SchedulerLimits

__all__ = ["ClockOfLoop", "Room", "RunningNode", "host_of"]

NUM_LAYERS = 2
_ALIGNMENT = 64
_PORT = 7001
_PATIENCE_S = 3600.0


def host_of(name: str) -> str:
    """A node's address."""
    number = int(name[1:])
    return f"10.{1 if name[0] == 'p' else 2}.{number >> 8}.{number & 255}"


class ClockOfLoop:
    """The loop's time as the simulated network asks for it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.call_at: Callable[..., None] = loop.call_outside

    def now_ns(self) -> int:
        return self._loop.now_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What all nodes share."""

    scenario: Scenario
    loop: VirtualLoop
    network: SimulatedNetwork
    control: ControlNetwork
    model: SimulatedModel
    #: Called with a broken invariant and what broke it.
    broken: Callable[[str, str], None]
    #: Called with a decoder's slot that is taken again, and its generation before.
    on_slot_reused: Callable[[str, int, int], None]


class _Fabric(SimulatedFabric):
    """Wakes the virtual loop instead of a descriptor."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: SimulatedNetwork,
        node: str,
        provider: Provider,
        num_domains: int,
    ) -> None:
        super().__init__(network, node, provider=provider, num_domains=num_domains)
        self._number = loop.take_fd()
        self.on_events(lambda: loop.readable(self._number))

    def fileno(self) -> int:
        return self._number


@dataclass(frozen=True, slots=True, kw_only=True)
class _SimulatedLoad(LoadedModel):
    """A loaded model whose scheduler has a watched pool."""

    watch: Watch

    def scheduler(self) -> Scheduler:
        limits = SchedulerLimits(
            page_size=self.layout.rank.page_size,
            chunk_len=self.config.chunk_len,
            max_num_seqs=self.config.max_num_seqs,
            reserve_output_len=self.config.reserve_output_len,
        )
        pool = WatchedPool(self.layout.rank.num_pages, self.watch)
        return Scheduler(limits, pool, self.weights_id if self.config.prefix_cache else None)


class RunningNode:
    """One life of a node: a process that runs the real node over simulated ranks."""

    def __init__(self, room: Room, name: str, life: int) -> None:
        scenario = room.scenario
        shape = scenario.nodes[name]
        self.name = name
        self.process = Process(name, host_of(name))
        self.watch: Watch | None = None
        self.frontend: SimulatedFrontend | None = None
        self.node: PrefillNode | DecodeNode | None = None
        #: One of its ranks was killed, so that the node ends by itself.
        self.has_lost_rank = False
        self._ranks: SimulatedRanks | None = None
        self._room = room
        self._shape = shape
        self._rng = random.Random(f"{scenario.seed}/{name}/{life}")
        self.layout = _layout(shape, scenario.num_kv_heads)
        room.network.node(name)
        coro = self._main()
        self.task = room.loop.create_task(coro, context=self.process.context.copy())

    @property
    def decoder(self) -> DecodeNode | None:
        """The node, if it is a decoder that runs."""
        return self.node if isinstance(self.node, DecodeNode) else None

    @property
    def prefiller(self) -> PrefillNode | None:
        """The node, if it is a prefiller that runs."""
        return self.node if isinstance(self.node, PrefillNode) else None

    def counts(self) -> dict[str, int]:
        """What the node tells of itself; nothing before it runs."""
        if self.decoder is not None:
            return self.decoder.status().counts
        return {} if self.prefiller is None else self.prefiller.status()

    def links_down(self) -> int:
        """How many of its links have ended."""
        workers = self._room.network.node(self.name).workers
        return sum(
            worker.counters.get("links_down", 0) + worker.counters.get("links_fenced", 0)
            for worker in workers
        )

    def stop(self) -> None:
        """End it on purpose, as SIGTERM does."""
        if self.frontend is not None:
            self.frontend.open = False
        self.task.cancel()

    def lose_rank(self) -> bool:
        """Kill a rank; False: there is none yet, or no more."""
        if self._ranks is None or self.has_lost_rank or self.task.done():
            return False
        self.has_lost_rank = True
        self._ranks.kill()
        return True

    async def _main(self) -> None:
        loaded = self._load()
        if self.name[0] == "p":
            await self._prefill(loaded)
        else:
            await self._decode(loaded)

    async def _prefill(self, loaded: LoadedModel) -> None:
        node = PrefillNode(
            loaded,
            model_name="simulated",
            listener=cast(socket.socket, Listener(self.process.host, _PORT)),
            fabric=self._choice(),
            opener=self._open_fabric,
        )
        await node.listen()
        self.node = node
        try:
            await node.run()
        finally:
            await node.stop("it is restarted")

    async def _decode(self, loaded: LoadedModel) -> None:
        scenario = self._room.scenario
        self.frontend = SimulatedFrontend(lambda: self._room.loop.now_ns, self._on_status)
        assert self.watch is not None
        node = DecodeNode(
            loaded,
            model_name="simulated",
            peers=[Address(host=host_of(peer), port=_PORT) for peer in scenario.peers[self.name]],
            fabric=self._choice(),
            local_below=self._shape.local_below,
            opener=self._open_fabric,
            frontend=self.frontend,
            slots=WatchedSlots(scenario.slot_bits, self.watch, self._on_slot_reused),
        )
        self.node = node
        try:
            await node.prefillers.connect_any(_PATIENCE_S, lambda _: None)
            await node.start_frontend(ServerConfig())
            await node.run()
        finally:
            await node.stop("it is restarted")

    def _on_slot_reused(self, slot: int, before: int) -> None:
        self._room.on_slot_reused(self.name, slot, before)

    def _choice(self) -> FabricChoice:
        return FabricChoice(self._room.scenario.provider)

    def _open_fabric(
        self, *, provider: Provider, bind_host: Sequence[str], options: FabricOptions
    ) -> Fabric:
        num_cards = 1 if provider == Provider.SHM else self._shape.num_cards
        return _Fabric(self._room.loop, self._room.network, self.name, provider, num_cards)

    def _on_status(self, status: NodeStatus) -> None:
        open_, taken = status.counts["transfers_open"], status.counts["slots_taken"]
        if open_ != taken:
            self._room.broken(
                "slots", f"{self.name}: {taken} slots are taken by {open_} open transfers"
            )

    def _load(self) -> LoadedModel:
        room, shape = self._room, self._shape
        self.watch = Watch(self.name, room.network, self.layout, room.broken)
        memory = SimulatedMemory(room.network.memory, self.layout)
        config = EngineConfig(
            dtype="float32",
            tp_size=shape.tp_size,
            page_size=shape.page_size,
            num_pages=shape.num_pages,
            chunk_len=shape.chunk_len,
            max_num_seqs=shape.max_num_seqs,
            reserve_output_len=shape.reserve_output_len,
            prefix_cache=shape.prefix_cache,
        )
        self._ranks = SimulatedRanks(
            room.loop, room.model, memory, self.layout, PassTimes(), self._rng
        )
        return _SimulatedLoad(
            folder=Path("/simulated"),
            weights_id="simulated",
            text_id="simulated",
            model=_model_config(room.scenario),
            config=config,
            layout=self.layout,
            ranks=self._ranks,
            memory=memory,
            load_s=0.0,
            watch=self.watch,
        )


def _layout(shape: NodeShape, num_kv_heads: int) -> NodeLayout:
    rank = KvLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=len(kv_heads_of_rank(num_kv_heads, shape.tp_size, 0)),
        head_dim=2,
        page_size=shape.page_size,
        num_pages=shape.num_pages,
        itemsize=4,
    )
    return NodeLayout(
        rank=rank, tp_size=shape.tp_size, num_kv_heads=num_kv_heads, alignment=_ALIGNMENT
    )


def _model_config(scenario: Scenario) -> ModelConfig:
    """The part of a loaded model that nodes look at."""
    return ModelConfig(
        family=Family.LLAMA,
        hidden_size=4,
        intermediate_size=4,
        num_layers=NUM_LAYERS,
        num_heads=scenario.num_kv_heads,
        num_kv_heads=scenario.num_kv_heads,
        head_dim=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=scenario.context_len,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4, scaling=None),
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(),
    )
