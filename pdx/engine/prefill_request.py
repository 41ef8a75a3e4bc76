"""What a prefiller knows of one transfer's prompt. Its twin on a decoder is ``decode_request``."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pdx.messenger.prefill_link import PrefillLink
from pdx.metrics.clock import now_s
from pdx.request.names import RequestNames

__all__ = ["PrefillRequest"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """Owned by the prefill node's event loop."""

    request_id: int
    link: PrefillLink
    transfer_id: int
    #: Not all of the prompt's scores are sent. The last ones follow the pass, the writes do not
    #: wait for its end.
    awaits_scores: bool
    names: RequestNames
    num_tokens: int
    #: The source pages, while writes may read them.
    lease_id: int | None = None
    #: When it came; seconds.
    start_s: float = field(default_factory=now_s)
    #: Tokens that the prefix cache held.
    num_cached: int = 0
    #: Nobody wants it any more.
    is_dropped: bool = False

    def log_end(self) -> None:
        """Nothing of it is computed or written any more."""
        fields = {
            "request_id": self.names.api_id,
            "x_request_id": self.names.x_request_id,
            "end": "dropped" if self.is_dropped else "prefilled",
            "decoder": self.link.peer,
            "prompt_tokens": self.num_tokens,
            "cached_tokens": self.num_cached,
            "total_s": round(now_s() - self.start_s, 6),
        }
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        logger.info("a prompt is done: %s", told, extra={"fields": fields})
