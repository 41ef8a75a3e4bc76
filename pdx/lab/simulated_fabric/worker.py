"""The worker of one simulated fabric: it posts what is due, counts what comes, beats, ends links.

It runs in turns, each a callback of the virtual clock; it owns every Link and Transfer. The rules
of what may happen when are in link.py, transfer.py and slots.py; this file and liveness.py connect
them to the network, in the order in which the native worker does.
"""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pdx.fabric.interface import (
    FabricEvent,
    FabricOptions,
    Fenced,
    LinkDown,
    Provider,
    Surplus,
)
from pdx.lab.simulated_fabric.imm import Imm
from pdx.lab.simulated_fabric.link import Lane, Link, LinkState, Operation, OpKind
from pdx.lab.simulated_fabric.liveness import Liveness
from pdx.lab.simulated_fabric.slots import SlotTable
from pdx.lab.simulated_fabric.transfer import Batch, Transfer, Write, WriteShape
from pdx.lab.simulated_fabric.words import WordWatch

if TYPE_CHECKING:
    from pdx.lab.simulated_fabric.network import SimulatedNetwork
    from pdx.lab.simulated_fabric.nodes import Endpoint, Node

__all__ = ["Worker"]

_POSTS_PER_TURN = 32
_BLOCKED_NAP_NS = 1_000_000


class Worker:
    """See the module. Commands are run in order, each some time after it was given."""

    def __init__(
        self,
        network: SimulatedNetwork,
        node: Node,
        provider: Provider,
        num_domains: int,
        options: FabricOptions,
        tell: Callable[[FabricEvent], None],
    ) -> None:
        self._network = network
        self._node = node
        self._provider = provider
        self._write_shape = network.write_shape or WriteShape.of(provider)
        self._tell_owner = tell
        self.liveness = Liveness(self, network, options)
        self.slots = SlotTable(network.imm_layout, self.tell)
        self.counters: defaultdict[str, int] = defaultdict(int)
        self.domain_counters: list[defaultdict[str, int]] = [
            defaultdict(int) for _ in range(num_domains)
        ]
        self.links: dict[int, Link] = {}
        self._endpoints: dict[int, list[Endpoint]] = {}
        self._transfers: dict[int, Transfer] = {}
        self._words = WordWatch(network.memory, self.kick)
        self._posting: dict[int, Link] = {}
        self._commands: list[Callable[[], None]] = []
        self._turn_due = False
        self._stopped = False

    # ---- turns ----------------------------------------------------------------------------------

    def submit(self, command: Callable[[], None]) -> None:
        """Any caller: run a command soon."""
        self._commands.append(command)
        self.kick()

    def kick(self) -> None:
        """Take a turn soon."""
        if not self._turn_due and not self._stopped:
            self._turn_due = True
            self._network.defer(self._node, self._network.draw_worker_ns(), self._turn)

    def stop(self) -> None:
        """Close every endpoint and run no more."""
        self._stopped = True
        self._commands.clear()
        self._words.stop()
        self._network.close_all(self._node, self)
        self.links.clear()
        self._endpoints.clear()

    def _turn(self) -> None:
        self._turn_due = False
        if self._stopped:
            return
        commands, self._commands = self._commands, []
        for command in commands:
            command()
        self._look_at_words()
        for link in list(self._posting.values()):
            self.post_link(link)

    # ---- commands -------------------------------------------------------------------------------

    def add_link(self, link: Link, endpoints: list[Endpoint]) -> None:
        """A link was opened, with an endpoint in each domain."""
        self.links[link.id] = link
        self._endpoints[link.id] = endpoints

    def open_transfer(self, transfer: Transfer) -> None:
        """A transfer begins."""
        link = self.links.get(transfer.link)
        if link is None:
            return
        self._transfers[transfer.id] = transfer
        link.transfers[transfer.id] = transfer
        if link.state is LinkState.DOWN:
            transfer.fail(errno.ENOTCONN)
            self._settle(transfer)

    def add_batch(self, transfer_id: int, batch: Batch) -> None:
        """Some more pages of a transfer."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.add(batch)
            self._words.watch(transfer_id, transfer.words)
            self._enqueue(transfer)

    def seal(self, transfer_id: int) -> None:
        """The last batch was given."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.seal()
            self._settle(transfer)

    def cancel(self, transfer_id: int) -> None:
        """Post nothing more of a transfer."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.cancel()
            self._settle(transfer)

    def fence(self, link_id: int) -> None:
        """Close the endpoints: what is in flight is cut, and the link is forgotten."""
        link = self.links.pop(link_id, None)
        if link is None:
            return
        self._posting.pop(link_id, None)
        pulled_from = self._provider == Provider.SHM and link.writes_in_flight > 0
        cut: dict[int, list[Write]] = {}
        for operation in link.operations:
            operation.link = None
            if operation.transfer is not None and operation.write is not None:
                cut.setdefault(operation.transfer.id, []).append(operation.write)
        for endpoint in self._endpoints.pop(link_id):
            self._network.close(endpoint)
        for transfer in list(link.transfers.values()):
            transfer.cut(cut.get(transfer.id, []), errno.ECANCELED)
            self._settle(transfer)
        link.state = LinkState.DOWN
        if pulled_from and link.peer is not None:
            # A stopped peer pulls when it wakes up.
            gone = partial(self.after, 0, partial(self._announce_fenced, link))
            self._network.when_gone(link.peer_ends[0].name, gone)
        else:
            self._announce_fenced(link)

    def _announce_fenced(self, link: Link) -> None:
        link.region.num_links -= 1
        self.count("links_fenced")
        self.tell(Fenced(link=link.id))

    # ---- writing --------------------------------------------------------------------------------

    def _look_at_words(self) -> None:
        for transfer_id, words in self._words.waiting():
            transfer = self._transfers[transfer_id]
            for word, value in words:
                transfer.look(word, value, self._network.now_ns())
            self._words.watch(transfer_id, transfer.words)
            self._enqueue(transfer)
            self._settle(transfer)

    def _enqueue(self, transfer: Transfer) -> None:
        link = self.links[transfer.link]
        if transfer.first_ready() is not None and transfer not in link.ready:
            link.ready.append(transfer)
            self._posting[link.id] = link

    def post_link(self, link: Link) -> None:
        """Post in turns of a few writes for each transfer, as far as credit goes."""
        refused: set[int] = set()
        while link.ready and link.state is LinkState.UP:
            transfer = link.ready[0]
            for _ in range(_POSTS_PER_TURN):
                batch = transfer.first_ready()
                if batch is None:
                    break
                lane = link.take_lane(refused)
                if lane is None:
                    return
                if not self._post_write(link, lane, transfer, batch):
                    refused.add(lane.index)
            if not link.ready:
                return  # a write was refused for too long, which ended the link
            link.ready.popleft()
            self._enqueue(transfer)
            self._settle(transfer)
        if not link.ready:
            self._posting.pop(link.id, None)

    def post(self, operation: Operation) -> bool:
        """Give an operation to the network. False: refused for the moment."""
        assert operation.link is not None
        endpoint = self._endpoints[operation.link.id][operation.lane.own]
        if not self._network.post(endpoint, operation):
            return False
        operation.link.took(operation)
        return True

    def _post_write(self, link: Link, lane: Lane, transfer: Transfer, batch: Batch) -> bool:
        write, position = batch.next_write(self._write_shape)
        imm = Imm(transfer.slot, transfer.generation, write.atoms)
        data = self._network.imm_layout.encode(imm)
        now_ns = self._network.now_ns()
        if not self.post(Operation(OpKind.WRITE, link, lane, write, transfer, data)):
            self.count("eagain")
            if lane.blocked_since_ns is None:
                lane.blocked_since_ns = now_ns
            if now_ns - lane.blocked_since_ns >= 2 * self.liveness.beat_timeout_ns:
                self.link_down(link, errno.EAGAIN, "no write could be posted in time")
            else:
                self.after(_BLOCKED_NAP_NS, self.kick)
            return False
        lane.blocked_since_ns = None
        batch.advance(position)
        transfer.posted(write, now_ns)
        self.counters["atoms_posted"] += write.atoms
        for counters in (self.counters, self.domain_counters[lane.own]):
            counters["writes_posted"] += 1
            counters["bytes_posted"] += write.num_bytes
        return True

    def _settle(self, transfer: Transfer) -> None:
        """Tell of the transfer's end, and forget it, once nothing of it is left."""
        link = self.links.get(transfer.link)
        if link is not None and transfer.first_ready() is None and transfer in link.ready:
            link.ready.remove(transfer)
        done = transfer.drained()
        if done is not None:
            self._words.watch(transfer.id, set())
            del self._transfers[transfer.id]
            if link is not None:
                del link.transfers[transfer.id]
            self.tell(done)

    # ---- what the network brings ----------------------------------------------------------------

    def on_complete(self, operation: Operation, code: int) -> None:
        """One of our operations came back."""
        if self._stopped:
            return
        link = operation.link
        if link is None:
            self.count("late_completions")
            return
        link.gave_back(operation)
        lane = operation.lane
        lane.blocked_since_ns = None
        if operation.kind is OpKind.BEAT:
            lane.beats_in_flight -= 1
        elif operation.kind is OpKind.PROBE:
            lane.probe_completed = code == 0
            self.liveness.try_up(link)
        else:
            assert operation.transfer is not None
            assert operation.write is not None
            self.count("writes_failed" if code else "writes_completed")
            operation.transfer.completed(operation.write, code)
            self._settle(operation.transfer)
        if code:
            self.link_down(link, code, f"a write failed: {errno.errorcode[code]}")
        elif link.ready:
            self.post_link(link)

    def on_imm(self, link: Link, domain: int, data: int) -> None:
        """A write of the peer has landed, and its immediate is here."""
        now_ns = self._network.now_ns()
        imm = self._network.imm_layout.decode(data)
        self.counters["imms_reaped"] += 1
        self.domain_counters[domain]["imms_reaped"] += 1
        if self.slots.credit(imm, now_ns):
            self.count("atoms_reaped", imm.atoms)
        else:
            self.count("stale_imms")
        link.on_imm(domain, now_ns)
        for lane in link.lanes_of[domain]:
            if link.beat_owed(domain) and link.state is LinkState.UP:
                self.liveness.send_beat(link, lane)

    def link_down(self, link: Link, code: int, reason: str) -> None:
        """Once for each link: its transfers end when the network gives back what it holds, or at
        the fence.
        """
        if link.state is LinkState.DOWN:
            return
        link.state = LinkState.DOWN
        self._posting.pop(link.id, None)
        link.ready.clear()
        self.count("links_down")
        self.tell(LinkDown(link=link.id, code=code, reason=reason))
        for transfer in list(link.transfers.values()):
            transfer.fail(code)
            self._words.watch(transfer.id, set())
            self._settle(transfer)

    def after(self, delay_ns: int, callback: Callable[[], None]) -> None:
        """Run ``callback`` later, unless the worker was stopped."""
        self._network.defer(self._node, delay_ns, self._unless_stopped, callback)

    def _unless_stopped(self, callback: Callable[[], None]) -> None:
        if not self._stopped:
            callback()

    def count(self, name: str, number: int = 1) -> None:
        """Raise a counter."""
        self.counters[name] += number

    def tell(self, event: FabricEvent) -> None:
        """Give an event to the owner."""
        if isinstance(event, Surplus):
            self.count("surplus_slots")
        self._tell_owner(event)
