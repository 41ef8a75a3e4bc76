"""Every environment variable of pdx's own, so that one that is none of them can be named: a
misspelt variable sets nothing, without a word.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from pdx.config.resolve import all_settings

__all__ = ["DESCRIPTOR_VARIABLE", "OTHER_VARIABLES", "unknown_variables"]

#: The pipe on which a node reports to its supervisor.
DESCRIPTOR_VARIABLE = "PDX_SUPERVISOR_FD"

#: Those that are no settings.
OTHER_VARIABLES: Mapping[str, str] = {
    "PDX_CONFIG": "the TOML file with settings, as --config",
    "PDX_FAULT": "faults that a node commits on purpose, for tests",
    "PDX_KERNELS": "interpret: ranks on a CPU run the kernels of GPUs, for tests",
    "PDX_LIBFABRIC": "the libfabric to load, instead of the one that is found",
    DESCRIPTOR_VARIABLE: "set by pdx serve for its nodes",
    "PDX_TEST_SEED": "the seed of pdx's own tests",
}
_PREFIX = "PDX_"
#: Kubernetes describes each service of a namespace so, to every container: pdx-decode gives
#: PDX_DECODE_SERVICE_HOST, PDX_DECODE_PORT and others.
_SERVICE_NAME = re.compile(r"PDX_\w*SERVICE_(HOST|PORT)\w*")
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")
_SERVICE_PORT = re.compile(r"PDX_\w*PORT_\d+_(TCP|UDP|SCTP)\w*")


def unknown_variables(env: Mapping[str, str]) -> dict[str, str | None]:
    """Variables that begin like ours and that nothing reads, each with the known one that it
    resembles most; None: it resembles none.
    """
    known = {*(each.env for each in all_settings()), *OTHER_VARIABLES}
    # The prefix is common to all; compared as well, it would make every two names alike.
    words = sorted(name.removeprefix(_PREFIX) for name in known)
    found = {}
    for name in sorted(env):
        if not name.upper().startswith(_PREFIX) or name in known or _is_service(name, env[name]):
            continue
        close = difflib.get_close_matches(name.upper().removeprefix(_PREFIX), words, n=1)
        found[name] = _PREFIX + close[0] if close else None
    return found


def _is_service(name: str, value: str) -> bool:
    return bool(
        _SERVICE_NAME.fullmatch(name)
        or _SERVICE_PORT.fullmatch(name)
        # The rest of such a set of variables.
        or _SERVICE_VALUE.match(value)
    )
