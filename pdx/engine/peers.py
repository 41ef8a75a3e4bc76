"""A decoder's prefillers: which of them are there, and which one takes the next prompt.

Owned by the decode node's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from pdx.config.node import RecoveryConfig
from pdx.engine.peer import PeerConnector, backoffs
from pdx.engine.recovery import Breaker, Prefiller
from pdx.errors import FabricError, NoDataPath, PeerError, PeerRefused
from pdx.messenger.decode_link import DecodeLink
from pdx.metrics.clock import now_s
from pdx.metrics.faults import Fault

__all__ = ["Peers"]

logger = logging.getLogger(__name__)


class Peers:
    """One connector and one breaker for each prefiller, and the prompt tokens that each has to do
    for us. A prefiller is named by its index.
    """

    def __init__(self, connectors: Sequence[PeerConnector], policy: RecoveryConfig) -> None:
        self._connectors = list(connectors)
        self._breakers = [
            Breaker(failure_rate=policy.breaker_rate, pause_s=policy.breaker_pause_s)
            for _ in connectors
        ]
        #: The process that answered at each address last.
        self._nodes = [""] * len(self._connectors)
        #: Of transfers that are not here yet: the prefiller's link, and tokens asked for.
        self._asked: dict[int, tuple[DecodeLink, int]] = {}
        #: When each was last asked, so that equals take turns.
        self._turns = [0] * len(self._connectors)
        self._num_asked = 0

    @property
    def links(self) -> list[DecodeLink]:
        """Those that take prompts now."""
        links = (connector.link for connector in self._connectors)
        return [link for link in links if link is not None and link.usable]

    @property
    def any_trusted(self) -> bool:
        """One of them takes prompts, and its breaker lets them through."""
        now = now_s()
        pairs = zip(range(len(self._connectors)), self._breakers, strict=True)
        return any(self.link(idx) is not None and each.allows(now) for idx, each in pairs)

    @property
    def max_prompt_len(self) -> int | None:
        """The longest prompt that one of them holds; None: none is there."""
        return max((link.max_prompt_len for link in self.links), default=None)

    @property
    def status(self) -> str:
        """What happens to the links, for people."""
        return "; ".join(connector.status for connector in self._connectors)

    @property
    def faults(self) -> Counter[Fault]:
        """Faults of links that are over, by reason."""
        return sum((connector.faults for connector in self._connectors), Counter())

    @property
    def num_breakers_opened(self) -> int:
        """How many times a prefiller was left alone because too much had failed there."""
        return sum(breaker.num_opened for breaker in self._breakers)

    def views(self, num_tokens: int) -> list[Prefiller]:
        """Each prefiller as to a prompt of this length, the one with the fewest tokens to do
        first.
        """
        order = sorted(range(len(self._connectors)), key=self._load)
        now = now_s()
        return [
            Prefiller(
                idx=idx,
                able=(link := self.link(idx)) is not None and link.max_prompt_len >= num_tokens,
                trusted=self._breakers[idx].allows(now),
            )
            for idx in order
        ]

    def link(self, idx: int) -> DecodeLink | None:
        """A prefiller's link, where it takes prompts now."""
        link = self._connectors[idx].link
        return link if link is not None and link.usable else None

    def linked(self, connector: PeerConnector) -> None:
        """There is a new link. What another process failed before says nothing of this one."""
        idx = self._connectors.index(connector)
        assert connector.link is not None
        if self._nodes[idx] != connector.link.peer_node:
            self._nodes[idx] = connector.link.peer_node
            self._breakers[idx].reset()

    def asked(self, idx: int, transfer_id: int, link: DecodeLink, num_tokens: int) -> None:
        """A transfer begins."""
        self._asked[transfer_id] = (link, num_tokens)
        self._num_asked += 1
        self._turns[idx] = self._num_asked
        self._breakers[idx].on_asked()

    def succeeded(self, idx: int) -> None:
        """A prefiller has done what it was asked."""
        self._breakers[idx].on_success()

    def failed(self, idx: int) -> None:
        """It has not, by no fault of the request's."""
        was_open = self._breakers[idx].is_open
        self._breakers[idx].on_failure(now_s())
        if self._breakers[idx].is_open and not was_open:
            address = self._connectors[idx].address
            logger.warning("too many prompts fail at %s: it is left alone for a while", address)

    def aborted(self, idx: int) -> None:
        """Its answer is not wanted any more."""
        self._breakers[idx].on_abort()

    def over(self, transfer_id: int) -> None:
        """Nothing more is to be done for a transfer; told of the first time only."""
        self._asked.pop(transfer_id, None)

    async def connect_any(self, timeout_s: float, on_wait: Callable[[str], None]) -> None:
        """Make the first link, waiting until a prefiller takes us; :meth:`run` makes the others.

        Raises:
            PeerRefused, NoDataPath: each of them refused us for good, or cannot be reached by
                writes; the last one's error.
            PeerError, FabricError: none worked for ``timeout_s`` seconds.
        """
        deadline = now_s() + timeout_s
        waits = backoffs()
        willing = list(self._connectors)
        said: set[str] = set()
        while True:
            for connector in list(willing):
                try:
                    return await connector.connect_once()
                except (PeerRefused, NoDataPath) as hopeless:
                    willing.remove(connector)
                    if not willing:
                        raise
                    on_wait(f"going on without {connector.address}: {hopeless.message}")
                except (PeerError, FabricError) as error:
                    failure = error
                    text = f"connecting to {connector.address}: {error.message}"
                    if text not in said:
                        said.add(text)
                        on_wait(text)
            if now_s() >= deadline:
                raise failure
            await asyncio.sleep(next(waits))

    async def run(self) -> None:
        """Keep all links until cancelled.

        Raises:
            PeerRefused: all of them refuse us.
        """
        keeping = {asyncio.create_task(c.run()): c for c in self._connectors}
        try:
            while keeping:
                done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    refused = task.exception()
                    connector = keeping.pop(task)
                    if not keeping or not isinstance(refused, PeerRefused):
                        task.result()
                    logger.error("%s refuses us: %s", connector.address, refused)
        finally:
            for task in keeping:
                task.cancel()

    async def stop(self, reason: str, fault: Fault | None) -> None:
        """End all links because this node ends."""
        await asyncio.gather(*(connector.stop(reason, fault) for connector in self._connectors))

    def _load(self, idx: int) -> tuple[int, int]:
        link = self._connectors[idx].link
        queued = sum(num_tokens for asked, num_tokens in self._asked.values() if asked is link)
        return queued, self._turns[idx]
