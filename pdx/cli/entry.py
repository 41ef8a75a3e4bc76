"""Where the `pdx` process begins. Imports next to nothing, so that an interrupt is quiet also while
the command line is still being imported.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import NoReturn

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; see ``pdx.cli.main``."""
    # An interrupt that our parent has us ignore stays ignored.
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, _leave)
    # What imports make stays, so looking for garbage among it is a tenth of a help page's time.
    gc.disable()
    from pdx.cli.main import main as run

    gc.freeze()
    gc.enable()
    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(number: int, frame: object) -> NoReturn:
    """Nothing has begun that would have to be ended."""
    os._exit(_INTERRUPTED)
