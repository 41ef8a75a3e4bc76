"""How the links of one simulated worker live: probes, beats, deadlines. Part of the worker, which
owns the links; see link.py for their states.
"""

from __future__ import annotations

import errno
from functools import partial
from typing import TYPE_CHECKING

from pdx.fabric.descriptor import LinkAddress
from pdx.fabric.interface import FabricOptions, LinkUp
from pdx.lab.simulated_fabric.link import Lane, Link, LinkState, Operation, OpKind

if TYPE_CHECKING:
    from pdx.lab.simulated_fabric.network import SimulatedNetwork
    from pdx.lab.simulated_fabric.worker import Worker

__all__ = ["Liveness"]

_MAX_BEATS_IN_FLIGHT = 4
_BLOCKED_NAP_NS = 1_000_000


class Liveness:
    """See the module."""

    def __init__(self, worker: Worker, network: SimulatedNetwork, options: FabricOptions) -> None:
        self._worker = worker
        self._network = network
        self._beat_interval_ns = round(options.beat_interval_s * 1e9)
        #: Half of how long the network may take no write.
        self.beat_timeout_ns = round(options.beat_timeout_s * 1e9)
        self._connect_timeout_ns = round(options.connect_timeout_s * 1e9)
        self._beating = False

    def connect(self, link_id: int, peer: LinkAddress) -> None:
        """Probe the peer, and wait for its probe."""
        link = self._worker.links.get(link_id)
        if link is None:
            return
        link.set_peer(peer)
        link.state = LinkState.CONNECTING
        self._worker.after(self._connect_timeout_ns, partial(self._give_up, link))
        for lane in link.lanes:
            self._post_probe(link, lane)

    def on_probe(self, link: Link, lane: int, tag: int) -> None:
        """The peer's probe landed."""
        if tag == link.probe_tag:
            link.on_probe(lane)
            self.try_up(link)

    def on_beat(self, link: Link, lane: int, tick: int, reaped: int) -> None:
        """A beat of the peer landed."""
        if link.on_beat(lane, tick, reaped, self._network.now_ns()):
            self._worker.post_link(link)

    def resumed(self, gap_ns: int) -> None:
        """This process was stopped so long: the silence was ours, and peers get the time back."""
        if gap_ns > 2 * self._beat_interval_ns:
            for link in self._worker.links.values():
                for lane in link.lanes:
                    lane.last_life_ns += gap_ns

    def _post_probe(self, link: Link, lane: Lane) -> None:
        assert link.peer is not None
        if link.state is not LinkState.CONNECTING:
            return
        if not self._worker.post(Operation(OpKind.PROBE, link, lane, imm=link.peer.probe_tag)):
            self._worker.after(_BLOCKED_NAP_NS, partial(self._post_probe, link, lane))

    def try_up(self, link: Link) -> None:
        """The link is up once every lane was probed both ways."""
        if link.state is not LinkState.CONNECTING:
            return
        if not all(lane.probe_completed and lane.peer_probed for lane in link.lanes):
            return
        link.state = LinkState.UP
        self._worker.count("links_up")
        self._worker.tell(LinkUp(link=link.id))
        for lane in link.lanes:
            lane.last_life_ns = self._network.now_ns()
            self.send_beat(link, lane)
            self._worker.after(self.beat_timeout_ns, partial(self._watch_life, link, lane))
        if not self._beating:
            self._beating = True
            self._worker.after(self._beat_interval_ns, self._beat)
        self._worker.post_link(link)

    def _give_up(self, link: Link) -> None:
        if link.state is LinkState.CONNECTING:
            what = (
                "the peer's probe did not arrive"
                if all(lane.probe_completed for lane in link.lanes)
                else "our probe did not get through"
            )
            seconds = self._connect_timeout_ns / 1e9
            self._worker.link_down(link, errno.ETIMEDOUT, f"{what} within {seconds:.1f} s")

    def _beat(self) -> None:
        up = [link for link in self._worker.links.values() if link.state is LinkState.UP]
        self._beating = bool(up)
        if up:
            self._worker.after(self._beat_interval_ns, self._beat)
        for link in up:
            for lane in link.lanes:
                self.send_beat(link, lane)

    def send_beat(self, link: Link, lane: Lane) -> None:
        """Tell the peer that we live, and what was counted."""
        # Skipped while earlier ones are stuck: a peer that takes none must not fill the queue.
        if lane.beats_in_flight >= _MAX_BEATS_IN_FLIGHT:
            return
        end = link.own[lane.own]
        beat = Operation(OpKind.BEAT, link, lane, tick=lane.tick + 1, reaped=end.reaped)
        if self._worker.post(beat):
            lane.tick += 1
            end.reported_reaped = end.reaped
            lane.beats_in_flight += 1
            self._worker.count("beats_sent")

    def _watch_life(self, link: Link, lane: Lane) -> None:
        if link.state is not LinkState.UP:
            return
        left_ns = lane.last_life_ns + self.beat_timeout_ns - self._network.now_ns()
        if left_ns > 0:
            self._worker.after(left_ns, partial(self._watch_life, link, lane))
            return
        seconds = self.beat_timeout_ns / 1e9
        self._worker.link_down(link, errno.ETIMEDOUT, f"no beat of the peer for {seconds:.1f} s")
