"""Why no write gets between two nodes that talk to each other: for people, on both sides. Pure."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DataPath", "may_heal"]

#: What a process or its host has run out of may be there the next time.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EAGAIN}


def may_heal(code: int | None) -> bool:
    """Whether to try again although the first write of a link failed with this error number."""
    return code in _EXHAUSTED


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPath:
    """The addresses of one link: those of its data path, and those of its control connection, which
    do reach each other.
    """

    own_role: str
    peer_role: str
    own_hosts: Sequence[str]
    peer_hosts: Sequence[str]
    own_control_host: str
    peer_control_host: str

    @property
    def whose(self) -> str:
        """Which side bound which addresses, and by which setting; empty where there are none."""
        if not self.own_hosts or not self.peer_hosts:
            return ""
        chosen = self._chosen()
        pairs = ((self.peer_role, self.peer_hosts), (self.own_role, self.own_hosts))
        texts = []
        for role, hosts in pairs:
            how = " by its --fabric-bind" if role in chosen else ""
            texts.append(f"the {role} bound {', '.join(hosts)}{how}")
        return "; ".join(texts)

    @property
    def hint(self) -> str | None:
        """What to change: an address that is not the control connection's was asked for."""
        if not self.own_hosts or not self.peer_hosts:
            return None
        if chosen := self._chosen():
            settings = " or ".join(f"--fabric-bind of the {role}" for role in chosen)
            return f"change {settings}: both nodes must reach each other's addresses"
        return "the control connection uses the same addresses: does a firewall close other ports?"

    def _chosen(self) -> list[str]:
        """The roles whose data addresses are not the control connection's."""
        theirs = [self.peer_role] if set(self.peer_hosts) != {self.peer_control_host} else []
        ours = [self.own_role] if set(self.own_hosts) != {self.own_control_host} else []
        return theirs + ours
