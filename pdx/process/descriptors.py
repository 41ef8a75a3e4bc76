"""File descriptors: how many this process may have, and what is said when they run out."""

from __future__ import annotations

import errno
import logging
import resource
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["DescriptorShortage", "descriptor_limit", "raise_descriptor_limit"]

logger = logging.getLogger(__name__)

#: More than any server here needs. Some containers have limits of a thousand million.
_MOST = 1 << 16
_SAID_EVERY_S = 60.0
#: What asyncio takes for a lack of descriptors or of the kernel's memory when it accepts.
_SHORT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def descriptor_limit() -> int:
    """How many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)


def raise_descriptor_limit() -> None:
    """Allow this process what its hard limit allows: the soft one is often 1,024, for the sake of
    programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class DescriptorShortage:
    """Says in one line a minute what asyncio would say in a traceback for each connection that
    cannot be accepted. asyncio itself stops accepting for a second and tries again."""

    def __init__(self) -> None:
        self._said_s: float | None = None

    def explains(self, context: Mapping[str, Any]) -> bool:
        """Whether the context of a loop's exception handler is of this kind; if so, it is dealt
        with."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _SHORT_OF and "socket" in context):
            return False
        now = time.monotonic()
        if self._said_s is None or now - self._said_s >= _SAID_EVERY_S:
            self._said_s = now
            logger.warning(
                "no connection can be accepted now: %s (at most %d files may be open; see "
                "`ulimit -n`); accepting goes on when there is room",
                error.strerror,
                descriptor_limit(),
            )
        return True
