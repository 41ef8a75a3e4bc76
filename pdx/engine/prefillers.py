"""A decoder's prefillers: which of them are there, what each has to do, and how it has done.

Owned by the decode node's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from pdx.config.node import RecoveryConfig
from pdx.engine.peer import PeerConnector, backoffs
from pdx.engine.recovery import Breaker, Candidate
from pdx.errors import FabricError, NoDataPath, PeerError, PeerRefused
from pdx.messenger.decode_link import DecodeLink
from pdx.metrics.clock import now_s
from pdx.metrics.faults import Fault

__all__ = ["Prefiller", "Prefillers"]

logger = logging.getLogger(__name__)


class Prefiller:
    """One prefiller of this decoder: the link to it, how it has done, what it still has to do."""

    def __init__(self, connector: PeerConnector, policy: RecoveryConfig) -> None:
        self.connector = connector
        self.breaker = Breaker(failure_rate=policy.breaker_rate, pause_s=policy.breaker_pause_s)
        #: Prompt tokens that were asked for over its present link, of transfers not settled yet.
        self.queued_tokens = 0
        #: The latest transfer that it was asked for: equals take turns.
        self.last_transfer_id = 0
        #: Identity of the process that answered last.
        self._node = ""

    @property
    def link(self) -> DecodeLink | None:
        """Its link, where it takes prompts now."""
        link = self.connector.link
        return link if link is not None and link.usable else None

    def on_link(self, link: DecodeLink) -> None:
        """There is a new link. What another process failed before says nothing of this one."""
        self.queued_tokens = 0
        if self._node != link.peer_node:
            self._node = link.peer_node
            self.breaker.reset()

    def on_asked(self, transfer_id: int, num_tokens: int) -> None:
        """It is asked for the KV cache of so many tokens."""
        self.last_transfer_id = transfer_id
        self.queued_tokens += num_tokens
        self.breaker.on_asked()

    def on_settled(self, link: DecodeLink, num_tokens: int) -> None:
        """Nothing more is to be done for a transfer that was asked for over a link."""
        if link is self.connector.link:
            self.queued_tokens -= num_tokens

    def on_failure(self) -> None:
        """It has not done what it was asked, by no fault of the request's."""
        was_open = self.breaker.is_open
        self.breaker.on_failure(now_s())
        if self.breaker.is_open and not was_open:
            address = self.connector.address
            logger.warning("too many prompts fail at %s: it is left alone for a while", address)


class Prefillers:
    """All of this decoder's prefillers."""

    def __init__(self, prefillers: Sequence[Prefiller]) -> None:
        self._all = prefillers

    @property
    def links(self) -> list[DecodeLink]:
        """Those that take prompts now."""
        return [link for each in self._all if (link := each.link) is not None]

    @property
    def any_trusted(self) -> bool:
        """One of them takes prompts, and its breaker lets them through."""
        now = now_s()
        return any(each.link is not None and each.breaker.allows(now) for each in self._all)

    @property
    def max_prompt_len(self) -> int | None:
        """The longest prompt that one of them holds; None: none is there."""
        return max((link.max_prompt_len for link in self.links), default=None)

    @property
    def status(self) -> str:
        """What happens to the links, for people."""
        return "; ".join(each.connector.status for each in self._all)

    @property
    def faults(self) -> Counter[Fault]:
        """Faults of links that are over, by reason."""
        return sum((each.connector.faults for each in self._all), Counter())

    @property
    def num_breakers_opened(self) -> int:
        """How many times a prefiller was left alone because too much had failed there."""
        return sum(each.breaker.num_opened for each in self._all)

    def candidates(self, num_tokens: int) -> list[Candidate[Prefiller]]:
        """All of them as to a prompt of this length, the one with the fewest tokens to do first."""
        now = now_s()
        return [
            Candidate(
                prefiller=each,
                able=(link := each.link) is not None and link.max_prompt_len >= num_tokens,
                trusted=each.breaker.allows(now),
            )
            for each in sorted(self._all, key=lambda it: (it.queued_tokens, it.last_transfer_id))
        ]

    async def connect_any(self, timeout_s: float, on_wait: Callable[[str], None]) -> None:
        """Make the first link, waiting until a prefiller takes us; :meth:`run` makes the others.

        Raises:
            PeerRefused, NoDataPath: each of them refused us for good, or cannot be reached by
                writes; the last one's error.
            PeerError, FabricError: none worked for ``timeout_s`` seconds.
        """
        deadline = now_s() + timeout_s
        waits = backoffs()
        willing = [each.connector for each in self._all]
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
        connectors = [each.connector for each in self._all]
        keeping = {asyncio.create_task(each.run()): each for each in connectors}
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
        await asyncio.gather(*(each.connector.stop(reason, fault) for each in self._all))
