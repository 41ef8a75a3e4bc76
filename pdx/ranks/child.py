"""A child process of a primary and the socket between the two: how ranks and the frontend begin and
end. Runs on the primary's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys

__all__ = ["how_it_ended", "start_child", "stop_child"]

#: A child has this long to end by itself once its channel is closed.
_STOP_S = 2.0
#: And this long to say where it hangs.
_ABORT_S = 1.0


async def start_child(
    module: str, *, stderr: int | None = None
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start `python -m MODULE --fd N`; returns the process and our end of its socket. What crashes
    it leaves its stack on stderr.

    Args:
        stderr: as for a subprocess; None: it writes to ours.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-X", "faulthandler", "-m", module, "--fd", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            process_group=0,  # a terminal's Ctrl-C is for the primary, also while this starts
        )
    ours.setblocking(False)
    return process, ours


async def stop_child(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a child whose channel is closed. Where it does not come, make it leave
    its stack on stderr, and kill it.
    """
    for patience_s, last_resort in ((_STOP_S, signal.SIGABRT), (_ABORT_S, signal.SIGKILL)):
        if process.returncode is not None:
            return
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(last_resort)
    await process.wait()


def how_it_ended(code: int | None) -> str:
    """A child's return code in words; None: it still runs, but its channel has ended."""
    if code is None:
        return "closed its channel"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
