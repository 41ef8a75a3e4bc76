"""A decoder's prefillers: which of them are there, and which one takes the next prompt.

Owned by the decode node's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from pdx.engine.peer import PeerConnector
from pdx.errors import FabricError, PeerError, PeerRefused
from pdx.messenger.decode_link import DecodeLink
from pdx.metrics.clock import now_s

__all__ = ["Peers"]

logger = logging.getLogger(__name__)
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0


class Peers:
    """One connector for each prefiller, and the prompt tokens that each has to do for us."""

    def __init__(self, connectors: Sequence[PeerConnector]) -> None:
        self._connectors = list(connectors)
        #: Of transfers that are not here yet: the prefiller's link, and tokens asked for.
        self._asked: dict[int, tuple[DecodeLink, int]] = {}
        #: The links in the order of their last use, so that equals take turns.
        self._turns: list[DecodeLink] = []

    @property
    def links(self) -> list[DecodeLink]:
        """Those that take prompts now."""
        links = (connector.link for connector in self._connectors)
        return [link for link in links if link is not None and link.usable]

    @property
    def max_prompt_len(self) -> int | None:
        """The longest prompt that one of them holds; None: none is there."""
        return max((link.max_prompt_len for link in self.links), default=None)

    @property
    def status(self) -> str:
        """What happens to the links, for people."""
        return "; ".join(connector.status for connector in self._connectors)

    def pick(self, num_tokens: int) -> DecodeLink | None:
        """The prefiller with the fewest tokens to do among those that hold the prompt."""
        links = self.links
        used = [link for link in self._turns if link in links]
        self._turns = [*(link for link in links if link not in used), *used]
        able = [link for link in self._turns if link.max_prompt_len >= num_tokens]
        return min(able, key=self._num_queued, default=None)

    def asked(self, transfer_id: int, link: DecodeLink, num_tokens: int) -> None:
        """A transfer begins."""
        self._asked[transfer_id] = (link, num_tokens)
        self._turns = [*(each for each in self._turns if each is not link), link]

    def over(self, transfer_id: int) -> None:
        """Nothing more is to be done for a transfer; told of the first time only."""
        self._asked.pop(transfer_id, None)

    async def connect_any(self, timeout_s: float, on_wait: Callable[[str], None]) -> None:
        """Make the first link, waiting until a prefiller takes us; :meth:`run` makes the others.

        Raises:
            PeerRefused: one refused us for good.
            PeerError, FabricError: none worked for ``timeout_s`` seconds.
        """
        deadline = now_s() + timeout_s
        backoff_s = _FIRST_BACKOFF_S
        while True:
            for connector in self._connectors:
                try:
                    return await connector.connect_once()
                except PeerRefused:
                    raise
                except (PeerError, FabricError) as error:
                    failure = error
                    on_wait(f"connecting to {connector.address}: {error.message}")
            if now_s() >= deadline:
                raise failure
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)

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

    async def stop(self, reason: str) -> None:
        """End all links on purpose."""
        await asyncio.gather(*(connector.stop(reason) for connector in self._connectors))

    def _num_queued(self, link: DecodeLink) -> int:
        return sum(num_tokens for asked, num_tokens in self._asked.values() if asked is link)
