"""Keeps a decoder's link to its prefiller: connects, serves, and connects again when the link was
lost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from pdx.config.providers import FabricChoice, Provider
from pdx.errors import FabricError, NoDataPath, PeerError, PeerLost, PeerRefused, ProtocolError
from pdx.messenger.control import Address, connect
from pdx.messenger.decode_link import DecodeLink, DecodeLinkOwner
from pdx.messenger.decode_side import TransferTimeouts
from pdx.messenger.fabric_hub import FabricHub
from pdx.messenger.handshake import NodeIdentity, describe, greet
from pdx.messenger.messages import Description
from pdx.messenger.slots import SlotTable
from pdx.metrics.clock import now_s
from pdx.metrics.faults import Fault

__all__ = ["PeerConnector", "backoffs", "describe_with_patience"]

logger = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 5.0
#: For the first write each way. The fabric gives up after 5 s, and says more than we could.
_PROBE_TIMEOUT_S = 6.0
#: After this the user hears of a prefiller that takes the connection and does not answer yet.
_SILENCE_S = 2.0
#: A try that begins at the deadline has this long.
_SHORTEST_TRY_S = 0.5
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0


def backoffs() -> Iterator[float]:
    """How long to wait before each further try, seconds."""
    backoff_s = _FIRST_BACKOFF_S
    while True:
        yield backoff_s
        backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)


async def describe_with_patience(
    addresses: Sequence[Address],
    *,
    timeout_s: float,
    on_wait: Callable[[str], None],
    secret: bytes | None = None,
) -> Description:
    """Ask prefillers what they serve, all at once, waiting until one is there that tells us.

    Raises:
        PeerLost: none was there for ``timeout_s`` seconds.
        PeerError: each refuses us, or is no prefiller of this protocol.
    """
    asking = {
        asyncio.create_task(_ask_until(now_s() + timeout_s, address, on_wait, secret)): address
        for address in dict.fromkeys(addresses)
    }
    silent: PeerLost | None = None
    try:
        while asking:
            done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                address = asking.pop(task)
                try:
                    return task.result()
                except (PeerRefused, ProtocolError) as refusal:
                    if not asking and silent is None:
                        raise
                    on_wait(f"without the prefiller at {address}: {refusal}")
                except PeerLost as lost:
                    silent = lost
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    assert silent is not None
    named = " or ".join(map(str, addresses))
    raise PeerLost(
        f"no prefiller at {named} in {timeout_s:g} s ({silent.message})",
        hint=f"check the address, or start it: pdx prefill --model M --listen {addresses[0]}",
        peer=str(addresses[0]),
    ) from silent


async def _ask_until(
    deadline_s: float, address: Address, on_wait: Callable[[str], None], secret: bytes | None
) -> Description:
    """Ask one prefiller. One that loads its model takes the connection and answers later, so the
    connection stays: a prefiller that comes up does not find those that we have left.

    Raises:
        PeerLost: it has not answered by then.
        PeerError: it refuses us, or is no prefiller of this protocol.
    """
    waits = backoffs()
    has_said = False

    def say(reason: str) -> None:
        nonlocal has_said
        if not has_said:
            has_said = True
            left_s = max(0.0, deadline_s - now_s())
            on_wait(f"waiting for the prefiller at {address} ({left_s:.0f} s at most): {reason}")

    loop = asyncio.get_running_loop()
    timer = loop.call_later(_SILENCE_S, say, "it does not answer yet")
    try:
        while True:
            left_s = max(_SHORTEST_TRY_S, deadline_s - now_s())
            try:
                async with asyncio.timeout(left_s):
                    return await describe(address, timeout_s=left_s + 1, secret=secret)
            except TimeoutError as error:
                reason = "it does not answer; while it loads its model, it only takes connections"
                raise PeerLost(f"{address}: {reason}", peer=str(address)) from error
            except PeerLost as lost:
                say(lost.message)
                left_s = deadline_s - now_s()
                if left_s <= 0:
                    raise
                await asyncio.sleep(min(next(waits), left_s))
    finally:
        timer.cancel()


class PeerConnector:
    """One link at a time; ``link`` is the newest, None before the first."""

    def __init__(
        self,
        address: Address,
        hub: FabricHub,
        slots: SlotTable,
        identity: NodeIdentity,
        *,
        owner: DecodeLinkOwner,
        on_link: Callable[[DecodeLink], None] = lambda link: None,
    ) -> None:
        """
        Args:
            on_link: called with each new link.
        """
        self.address = address
        self._hub = hub
        self._slots = slots
        self._identity = identity
        self._owner = owner
        self._on_link = on_link
        self.link: DecodeLink | None = None
        #: The provider of the last link that could not be made; empty: none was chosen yet.
        self._provider = ""
        #: Faults of links that are over, by reason.
        self.faults: Counter[Fault] = Counter()
        self._status = f"connecting to {address}"
        self._serving: asyncio.Task[None] | None = None

    @property
    def status(self) -> str:
        """What happens to the link, for people."""
        if self._serving is not None and self.link is not None and self.link.end_reason is not None:
            return f"lost {self.address}: {self.link.end_reason}"
        if self.link is not None and self.link.is_draining:
            return f"{self.address} is draining"
        return self._status

    async def connect_once(self) -> None:
        """Make a link; its task runs in the background. Where shared memory may be used and carries
        nothing (the two nodes are of different users, say), the network is tried.

        Raises:
            PeerRefused: the prefiller refused us for good.
            NoDataPath: no write gets to it, or back.
            PeerError, FabricError: it did not work this time.
        """
        try:
            link = await self._connect(self._identity)
        except NoDataPath as error:
            if self._identity.fabric != FabricChoice.AUTO or self._provider != Provider.SHM:
                raise
            logger.warning("tcp is used instead of shm: %s", error.message)
            self._identity = dataclasses.replace(self._identity, fabric=FabricChoice.TCP)
            link = await self._connect(self._identity)
        self.link = link
        self._status = f"connected to {self.address} ({link.provider})"
        self._serving = asyncio.create_task(link.run())
        self._on_link(link)

    async def _connect(self, identity: NodeIdentity) -> DecodeLink:
        connection = await connect(self.address, timeout_s=_CONNECT_TIMEOUT_S)
        link = DecodeLink(
            connection=connection,
            hub=self._hub,
            slots=self._slots,
            owner=self._owner,
            timeouts=TransferTimeouts(),
        )
        try:
            await greet(link, connection, self._hub, identity, timeout_s=_PROBE_TIMEOUT_S)
        except (PeerError, FabricError) as error:
            self._provider = link.provider
            link.end(error.message, None)
            await link.over.wait()
            await connection.close()
            self._count_fault(link)
            raise
        return link

    async def run(self) -> None:
        """Keep the link until cancelled.

        Raises:
            PeerRefused: the prefiller that came back refuses us.
        """
        waits = backoffs()
        while True:
            if self._serving is not None:
                # Not `await`: who cancels this task has the link served on, until stop() ends it.
                await asyncio.wait([self._serving])
                self._serving.result()
                assert self.link is not None
                self._count_fault(self.link)
                logger.warning("%s", self.status)
            try:
                await self.connect_once()
                waits = backoffs()
                logger.info("%s", self.status)
            except PeerRefused:
                raise
            except (PeerError, FabricError) as error:
                self._serving = None
                self._note(error)
                await asyncio.sleep(next(waits))

    def _note(self, error: PeerError | FabricError) -> None:
        """Why there is no link. A data path that is missing is not mended by waiting: it is said,
        once as long as nothing changes.
        """
        status = f"not connected to {self.address}: {error.message}"
        if isinstance(error, NoDataPath) and status != self._status:
            logger.warning("%s; %s", status, error.hint)
        self._status = status

    def _count_fault(self, link: DecodeLink) -> None:
        if link.fault is not None:
            self.faults[link.fault] += 1

    async def stop(self, reason: str, fault: Fault | None) -> None:
        """End the link because this node ends, and wait for its fence (two seconds at most)."""
        if self.link is None or self._serving is None:
            return
        self.link.end(reason, fault)
        await asyncio.wait([self._serving], timeout=2.0)
        self._serving.cancel()
