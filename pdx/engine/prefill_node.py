"""The prefiller: accepts links from decoders, runs their prompts, and has the KV cache written
across meanwhile.

Everything here runs on the primary's event loop; the fabric's worker posts the writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Sequence

import numpy as np

from pdx.config.providers import FabricChoice
from pdx.engine.loading import LoadedModel, mapped_memory
from pdx.engine.prefill_request import PrefillRequest
from pdx.engine.status_page import answer_http, is_http, prefiller_pages
from pdx.engine.step_loop import StepLoop
from pdx.engine.tasks import fail_with_ranks, run_until_one_ends
from pdx.engine.throughput import Throughput
from pdx.errors import CapacityError, InvalidRequest, PdxError, PeerError, PeerLost, PeerRefused
from pdx.fabric import FabricOptions, open_fabric
from pdx.kv.pages import Use
from pdx.kv.progress import pass_and_layers
from pdx.messenger.control import Address, ControlConnection
from pdx.messenger.fabric_hub import FabricHub, FabricOpener
from pdx.messenger.handshake import NodeIdentity, welcome
from pdx.messenger.listener import ControlListener
from pdx.messenger.messages import Description, Hello, Prefill
from pdx.messenger.prefill_link import PrefillLink
from pdx.metrics.faults import Fault, fault_counts
from pdx.metrics.transfers import RankProgress, Sends
from pdx.process.sparse_log import SparseLog
from pdx.scheduler.passes import ScheduledPass
from pdx.scheduler.request import PromptScoring, RequestUpdate

__all__ = ["PrefillNode"]

logger = logging.getLogger(__name__)
_STOP_S = 2.0
#: A connection that says nothing is closed.
_FIRST_BYTES_S = 10.0
#: The API allows no more either.
_MAX_TOP_LOGPROBS = 20


class PrefillNode:
    """See the module's docstring. The loaded model stays the caller's; close it after :meth:`stop`.

    Args:
        model_name: what the user called the model; decoders may load it by this name.
        listener: where decoders connect; the node closes it when it stops.
        fabric_cpu: core to pin the fabric's worker to.
        fabric_bind: addresses of the network cards to stripe over.
        secret: what it shares with its decoders, if anything.
        opener: where its fabrics come from.
        num_rejected: so many of the first prompts are rejected, for tests.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        model_name: str,
        listener: socket.socket,
        fabric: FabricChoice,
        fabric_cpu: int | None = None,
        fabric_bind: Sequence[str] = (),
        secret: bytes | None = None,
        opener: FabricOpener = open_fabric,
        num_rejected: int = 0,
    ) -> None:
        self._loaded = loaded
        self._listener = ControlListener(listener, self._serve)
        self._description = Description(
            model=model_name, dtype=loaded.config.dtype, page_size=loaded.layout.rank.page_size
        )
        self._identity = NodeIdentity(
            node=secrets.token_hex(8), manifest=loaded.manifest(), fabric=fabric, secret=secret
        )
        options = FabricOptions(cpu=fabric_cpu)
        self._hub = FabricHub(mapped_memory(loaded), options, fabric_bind, opener)
        self.scheduler = loaded.scheduler()
        self._loop = StepLoop(
            self.scheduler, loaded.ranks, self, watchdog_s=loaded.config.watchdog_s
        )
        self._throughput = Throughput(self.scheduler)
        self._requests: dict[int, PrefillRequest] = {}
        self._by_transfer: dict[tuple[PrefillLink, int], PrefillRequest] = {}
        #: Leases under failed writes of a link that is not fenced yet.
        self._unproved: dict[PrefillLink, list[int]] = {}
        self._links: set[PrefillLink] = set()
        self._link_over = asyncio.Event()
        #: Nothing new is taken.
        self.is_draining = False
        self._num_to_reject = num_rejected
        #: Each link's number for the scheduler, which treats decoders alike.
        self._group_of: dict[PrefillLink, int] = {}
        self._next_group = itertools.count(1)
        #: Those with a chunk in the pass that runs.
        self._in_pass: list[PrefillRequest] = []
        self._next_request_id = itertools.count(1)
        #: Warnings that other hosts can cause again and again.
        self._strangers, self._refusals, self._cut_off = (SparseLog(logger) for _ in range(3))
        #: Events by name.
        self.counters: Counter[str] = Counter()
        self._faults: Counter[Fault] = Counter()
        #: The fault that decoders count when this node ends.
        self._own_fault: Fault | None = None
        self._pages = prefiller_pages(self)

    async def listen(self) -> list[Address]:
        """Take connections; returns the addresses that decoders may use, the likeliest first."""
        return await self._listener.listen()

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            PdxError: the rank failed; the node must stop.
        """
        try:
            await run_until_one_ends(
                self._loop.run(), fail_with_ranks(self._loaded.ranks), self._throughput.report()
            )
        except PdxError:
            self._own_fault = Fault.PEER_FAILED
            raise

    async def drain(self) -> None:
        """Take nothing new; return when each decoder has all that it asked for, and has left."""
        self.is_draining = True
        for link in list(self._links):
            with contextlib.suppress(PeerLost):
                link.send_draining()
        while self._links:
            self._link_over.clear()
            await self._link_over.wait()

    async def stop(self, reason: str) -> None:
        """End every link and close the fabrics."""
        self._listener.close()
        links = list(self._links)
        for link in links:
            link.end(reason, self._own_fault)
        waits = [asyncio.create_task(link.over.wait()) for link in links]
        if waits:
            await asyncio.wait(waits, timeout=_STOP_S)
        await self._listener.end()
        for log in (self._strangers, self._refusals, self._cut_off):
            log.close()
        self._hub.close()

    # ---- links ----------------------------------------------------------------------------

    async def _serve(
        self,
        connection: ControlConnection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        link = None
        try:
            head = await connection.first_bytes(_FIRST_BYTES_S)
            if is_http(head):
                await answer_http(head, reader, writer, self._pages)
                return
            if self.is_draining:
                return
            link = await welcome(
                connection,
                self._identity,
                self._description,
                self._loaded.context_len,
                lambda hello: self._make_link(connection, hello),
            )
            if link is not None:
                self._listener.known(connection)
                self.counters["links"] += 1
                if self.is_draining:
                    link.send_draining()
                await link.run()
        except PeerRefused as refusal:
            self._refusals.warn(f"the decoder at {connection.peer} is refused: {refusal.message}")
        except PeerError as error:
            self._faults[Fault.BAD_CONNECTION] += 1
            self._strangers.warn(f"connection from {connection.peer} closed: {error.message}")
        except PdxError:
            logger.exception("connection from %s failed", connection.peer)
        finally:
            if link is not None:
                link.end("its task ended", None)  # says nothing where it has ended already
            await connection.close()

    def _make_link(self, connection: ControlConnection, hello: Hello) -> PrefillLink:
        for old in [link for link in self._links if link.node == hello.node]:
            old.end("the same decoder opened a new link", Fault.CONNECTION_LOST)
        link = PrefillLink(
            connection=connection,
            hello=hello,
            hub=self._hub,
            layout=self._loaded.layout,
            owner=self,
        )
        self._links.add(link)
        self._group_of[link] = next(self._next_group)
        return link

    def on_fault(self, link: PrefillLink, fault: Fault) -> None:
        self._faults[fault] += 1

    def link_over(self, link: PrefillLink) -> None:
        self._links.discard(link)
        self._link_over.set()
        self._group_of.pop(link, None)
        for lease_id in self._unproved.pop(link, []):
            self.scheduler.pool.drop(lease_id, Use.UNPROVED_SEND)
        if link.lacks_data_path is not None:
            self._cut_off.warn(
                f"no data path with the decoder at {link.peer}: {link.lacks_data_path} "
                f"({link.addresses})"
            )
        logger.info("link with %s is over, fenced: %s", link.peer, self.scheduler.pool.counts())
        self._loop.wake()

    # ---- PrefillLinkOwner -----------------------------------------------------------------

    def accept(self, link: PrefillLink, prefill: Prefill) -> None:
        if self.is_draining:
            raise CapacityError("the prefiller is draining")
        if self._num_to_reject:
            self._num_to_reject -= 1
            raise CapacityError("the prefiller rejects prompts: PDX_FAULT asks for that")
        if len(prefill.token_ids) > self._loaded.context_len:
            raise InvalidRequest(
                f"{len(prefill.token_ids)} tokens exceed the prefiller's context of "
                f"{self._loaded.context_len}",
                param="prompt",
            )
        self._check_tokens(prefill)
        scoring = None
        if prefill.prompt_logprobs is not None:
            scoring = PromptScoring(
                num_top=prefill.prompt_logprobs, next_token_id=prefill.last_token_id
            )
        request_id = next(self._next_request_id)
        self.scheduler.submit(
            request_id,
            prefill.token_ids,
            None,
            scoring,
            cache_salt=prefill.cache_salt,
            group=self._group_of[link],
        )
        request = PrefillRequest(
            request_id,
            link,
            prefill.transfer_id,
            awaits_scores=scoring is not None,
            names=prefill.names.cleaned(),
            num_tokens=len(prefill.token_ids),
        )
        self._requests[request_id] = self._by_transfer[link, prefill.transfer_id] = request
        self._loop.wake()

    def _check_tokens(self, prefill: Prefill) -> None:
        """Check what the rank takes for granted: a wrong decoder must not end this node.

        Raises:
            InvalidRequest: naming what is out of range.
        """
        vocab_size = self._loaded.model.vocab_size
        last_id = prefill.last_token_id or 0
        largest = np.frombuffer(prefill.token_ids, np.uint32).max(initial=0)
        if largest >= vocab_size or not 0 <= last_id < vocab_size:
            bad = largest if largest >= vocab_size else last_id
            raise InvalidRequest(
                f"token id {bad} is outside the vocabulary of {vocab_size}", param="prompt"
            )
        num_top = prefill.prompt_logprobs
        if num_top is not None and not 0 <= num_top <= _MAX_TOP_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs must be 0 to {_MAX_TOP_LOGPROBS}, not {num_top}",
                param="prompt_logprobs",
            )

    def drop(self, link: PrefillLink, transfer_id: int) -> None:
        request = self._by_transfer.get((link, transfer_id))
        if request is None:
            return
        self.scheduler.abort(request.request_id)
        request.awaits_scores = False
        request.is_dropped = True
        self._forget_if_done(request)  # unless something was armed, no release will come
        self._loop.wake()

    def hold_source(self, link: PrefillLink, transfer_id: int) -> None:
        request = self._by_transfer[link, transfer_id]
        leased = self.scheduler.request(request.request_id)
        assert leased is not None and leased.lease_id is not None
        request.lease_id = leased.lease_id
        self.scheduler.pool.hold(request.lease_id, Use.SEND)

    def release_source(self, link: PrefillLink, transfer_id: int, *, unproved: bool) -> None:
        request = self._by_transfer[link, transfer_id]
        assert request.lease_id is not None
        if unproved:
            self.scheduler.pool.exchange(request.lease_id, Use.SEND, Use.UNPROVED_SEND)
            self._unproved.setdefault(link, []).append(request.lease_id)
        else:
            self.scheduler.pool.drop(request.lease_id, Use.SEND)
        request.lease_id = None
        self._forget_if_done(request)
        self._loop.wake()

    def _forget_if_done(self, request: PrefillRequest) -> None:
        if request.lease_id is not None or request.awaits_scores:
            return
        request.log_end()
        del self._requests[request.request_id]
        del self._by_transfer[request.link, request.transfer_id]

    # ---- Role -----------------------------------------------------------------------------

    def admit(self) -> None:
        for admitted in self.scheduler.admit():
            self._throughput.on_admitted(len(admitted.token_ids), admitted.num_cached)
            if (request := self._requests.get(admitted.request_id)) is not None:
                request.num_cached = admitted.num_cached
            self.scheduler.start(admitted.request_id)

    def before_pass(self, scheduled: ScheduledPass) -> None:
        self._in_pass = []
        for chunk in scheduled.chunks:
            self._throughput.num_prompt_tokens += chunk.end - chunk.start
            request = self._requests.get(chunk.request_id)
            if request is None:
                continue  # an earlier chunk found that their common link is down, which ended it
            self._in_pass.append(request)
            request.link.on_chunk(request.transfer_id, chunk)

    def after_pass(self, updates: list[RequestUpdate]) -> None:
        for each in self._in_pass:
            each.link.on_chunk_done(each.transfer_id)
        self.counters["prefilled"] += sum(update.prefilled for update in updates)
        for update in updates:
            request = self._requests.get(update.request_id)
            if update.prompt_scores is None or request is None:
                continue
            request.link.on_scores(request.transfer_id, update.prompt_scores, last=update.prefilled)
            if update.prefilled:
                request.awaits_scores = False
                self._forget_if_done(request)

    # ---- health ---------------------------------------------------------------------------

    def transfers(self) -> Sends:
        """Prompts on their way out, and how far each rank is."""
        return Sends(
            ranks=[self._progress_of(address) for address in self._hub.memory.progress_addresses],
            live=[view for link in self._links for view in link.views()],
        )

    def _progress_of(self, address: int) -> RankProgress:
        num_layers = self._loaded.layout.rank.num_layers
        word = ctypes.c_uint64.from_address(address).value
        pass_idx, layers_done = pass_and_layers(word, num_layers)
        return RankProgress(pass_idx=pass_idx, layers_done=layers_done, num_layers=num_layers)

    def status(self) -> dict[str, int]:
        """Pages by state, queues, links, what went out, and faults."""
        pages = self.scheduler.pool.counts()._asdict()
        sent = self._hub.statistics()
        return {
            **{f"pages_{state}": count for state, count in pages.items()},
            "requests_waiting": self.scheduler.num_waiting,
            "requests_active": self.scheduler.num_active,
            "preemptions": self.scheduler.num_preemptions,
            "transfers_open": sum(link.num_open for link in self._links),
            "links_open": len(self._links),
            "atoms_posted": sum(fabric.atoms_posted for fabric in sent),
            "writes_failed": sum(fabric.writes_failed for fabric in sent),
            **fault_counts(self._faults),
            **self.counters,
        }
