"""What a node does per second, as a line of the log while there is work. Runs on the primary's
event loop.
"""

from __future__ import annotations

import asyncio
import logging

from pdx.metrics.clock import now_s
from pdx.scheduler.scheduler import Scheduler

__all__ = ["Throughput"]

logger = logging.getLogger(__name__)
_PERIOD_S = 10.0


class Throughput:
    """Counts tokens where they are taken in; :meth:`report` tells of them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        #: Prompt tokens of requests that were admitted, and those that a prefix cache held.
        self._num_admitted = 0
        self._num_cached = 0

    def on_admitted(self, num_tokens: int, num_cached: int) -> None:
        """A request has got its pages."""
        self._num_admitted += num_tokens
        self._num_cached += num_cached

    async def report(self) -> None:
        """Write a line every ten seconds in which there was work, until cancelled."""
        while True:
            before = (self.num_prompt_tokens, self.num_generated_tokens)
            start_s = now_s()
            await asyncio.sleep(_PERIOD_S)
            prompt = self.num_prompt_tokens - before[0]
            generated = self.num_generated_tokens - before[1]
            scheduler = self._scheduler
            if prompt or generated or scheduler.num_active or scheduler.num_waiting:
                self._write(prompt, generated, now_s() - start_s)

    def _write(self, prompt: int, generated: int, passed_s: float) -> None:
        pages = self._scheduler.pool.counts()
        total = self._scheduler.pool.num_pages
        in_use = (total - pages.free - pages.cached) / total
        hits = self._num_cached / self._num_admitted if self._num_admitted else 0.0
        fields = {
            "running": self._scheduler.num_active,
            "waiting": self._scheduler.num_waiting,
            "prompt_tokens_per_s": round(prompt / passed_s, 1),
            "generated_tokens_per_s": round(generated / passed_s, 1),
            "pages_in_use": round(in_use, 4),
            "prefix_hit_rate": round(hits, 4),
        }
        logger.info(
            "running %d, waiting %d; per second %.1f prompt and %.1f generated tokens; KV pages in "
            "use %.1f %%, prefix hits %.1f %% of the prompt tokens",
            fields["running"],
            fields["waiting"],
            fields["prompt_tokens_per_s"],
            fields["generated_tokens_per_s"],
            100 * in_use,
            100 * hits,
            extra={"fields": fields},
        )
