"""An asyncio event loop in virtual time, shared by all simulated processes of a history.

Nothing waits: when nothing is ready, the clock jumps to the next timer. What is ready at one moment
runs in the order in which it became ready, so a history depends on nothing but its seed. There is
no selector; readers are called by :meth:`VirtualLoop.readable`, connections come from a
:class:`ControlNetwork`.

Every callback belongs to the simulated process whose context it was made in. Those of a paused
process wait until it is resumed; those of a dead one never run.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVarTuple

if TYPE_CHECKING:
    from pdx.lab.sim.wire import ControlNetwork

__all__ = ["Process", "VirtualLoop", "current_process"]

_FIRST_FD = 1 << 20
#: Some clean up after the first, and wait again.
_CANCELS = 4
#: More callbacks at one moment are a loop that never waits.
_MOST_STEPS_AT_ONCE = 100_000
_Ts = TypeVarTuple("_Ts")


@dataclass(slots=True, eq=False)
class Process:
    """A simulated process. A restarted one is another Process of the same name."""

    name: str
    #: Its address, which no other node has.
    host: str
    dead: bool = False
    paused: bool = False
    #: What would have run while it is paused.
    backlog: list[_Handle] = field(default_factory=list)
    #: Tasks that it has started, to be disposed of with the loop.
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    #: What its callbacks run in that come from outside.
    context: contextvars.Context = field(default_factory=contextvars.Context)

    def __post_init__(self) -> None:
        self.context.run(_current.set, self)


_current: contextvars.ContextVar[Process | None] = contextvars.ContextVar(
    "pdx-sim-process", default=None
)


def current_process() -> Process:
    """The process that runs now."""
    process = _current.get()
    assert process is not None
    return process


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Handle:
    """A callback that will run, unless it is cancelled."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "process", "when_ns")

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
        process: Process | None,
        when_ns: int,
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.process = process
        self.when_ns = when_ns
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.when_ns * 1e-9


class VirtualLoop(asyncio.AbstractEventLoop):
    """See the module's docstring.

    Args:
        on_error: told of exceptions that nobody handled, with the process they happened in.
    """

    def __init__(self, on_error: Callable[[Process | None, str], None]) -> None:
        self.control: ControlNetwork | None = None
        #: Callbacks so far.
        self.num_steps = 0
        self._on_error = on_error
        #: Virtual time, which nobody else moves.
        self.now_ns = 0
        self._ready: deque[_Handle] = deque()
        #: Timers by time, then as they came. One without a handle belongs to no process.
        self._timers: list[
            tuple[int, int, _Handle | None, Callable[..., Any], tuple[Any, ...]]
        ] = []
        self._order = itertools.count()
        #: The last callback that this moment may have.
        self._last_step = _MOST_STEPS_AT_ONCE
        self._readers: dict[int, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {}
        self._next_fd = itertools.count(_FIRST_FD)
        self._world = contextvars.Context()
        self._closed = False
        self._running: Process | None = None

    # ---- running --------------------------------------------------------------------------

    def run_until(self, when_ns: int, done: Callable[[], bool]) -> bool:
        """Run until ``done`` (asked now and then), or until a moment; whether it was done."""
        with self._as_running():
            while not done():
                if not self._run_some(16, when_ns):
                    self.now_ns = max(self.now_ns, when_ns)
                    return done()
        return True

    def dispose(self, processes: list[Process]) -> None:
        """End all tasks of processes, dead ones too, and close the loop."""
        for process in processes:
            process.dead = process.paused = False
            self._ready.extend(process.backlog)
        with self._as_running():
            for _ in range(_CANCELS):
                tasks = [task for each in processes for task in each.tasks if not task.done()]
                for task in tasks:
                    task.cancel()
                if tasks:
                    self._run_some(20_000, self.now_ns + 3_000_000_000)
        if self.control is not None:
            self.control.is_over = True
        self._ready.clear()
        self._timers.clear()
        self._closed = True

    @contextmanager
    def _as_running(self) -> Iterator[None]:
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def _run_some(self, most: int, until_ns: int) -> bool:
        """Run some callbacks; False: none is left before that moment."""
        ready, timers, heappop = self._ready, self._timers, heapq.heappop
        handle: _Handle | None
        for _ in range(most):
            if ready:
                handle = ready.popleft()
            else:
                while True:
                    if not timers or timers[0][0] > until_ns:
                        return False
                    when_ns, _, handle, callback, args = heappop(timers)
                    if handle is None or not handle.is_cancelled:
                        break
                if when_ns > self.now_ns:
                    self.now_ns = when_ns
                    self._last_step = self.num_steps + _MOST_STEPS_AT_ONCE
            process = None
            if handle is not None:
                if handle.is_cancelled:
                    continue
                process = handle.process
                if process is not None and (process.dead or process.paused):
                    if not process.dead:
                        process.backlog.append(handle)
                    continue
            self.num_steps += 1
            self._running = process
            if self.num_steps > self._last_step:
                self._last_step = self.num_steps + _MOST_STEPS_AT_ONCE
                self._on_error(process, "it runs without end")
            try:
                if handle is None:
                    callback(*args)
                else:
                    handle.context.run(handle.callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except asyncio.CancelledError:
                pass  # of a task whose end a callback looked at
            except Exception as error:  # noqa: BLE001 - the edge of a simulated process
                self._on_error(process, f"a callback failed: {error!r}")
        return True

    def pause(self, process: Process) -> None:
        """SIGSTOP."""
        process.paused = True

    def resume(self, process: Process) -> None:
        """SIGCONT: what waited runs now, in its order."""
        process.paused = False
        self._ready.extend(process.backlog)
        process.backlog.clear()

    # ---- time and callbacks ---------------------------------------------------------------

    def time(self) -> float:
        return self.now_ns * 1e-9

    def call_soon(
        self,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = self._handle(callback, args, context, self.now_ns)
        self._ready.append(handle)
        return handle  # type: ignore[return-value]  # as far as anybody looks

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._at(self.now_ns + round(delay * 1e9), callback, args, context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        # Never early: whoever asked compares with time().
        when_ns = round(when * 1e9)
        while when_ns * 1e-9 < when:
            when_ns += 1
        return self._at(when_ns, callback, args, context)

    def call_at_ns(
        self, when_ns: int, callback: Callable[..., Any], *args: Any, process: Process | None = None
    ) -> None:
        """Run a callback in a process, or in none."""
        context = self._world if process is None else process.context
        handle = _Handle(callback, args, context, process, when_ns)
        heapq.heappush(self._timers, (when_ns, next(self._order), handle, callback, args))

    def call_outside(self, when_ns: int, callback: Callable[..., Any], *args: Any) -> None:
        """Run a callback in no process."""
        heapq.heappush(self._timers, (when_ns, next(self._order), None, callback, args))

    async def sleep_ns(self, delay_ns: int) -> None:
        """What asyncio.sleep() does, for half of it."""
        future = self.create_future()
        self.call_at_ns(self.now_ns + delay_ns, _wake, future, process=_current.get())
        await future

    def _at(
        self,
        when_ns: int,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> asyncio.TimerHandle:
        handle = self._handle(callback, args, context, when_ns)
        heapq.heappush(self._timers, (when_ns, next(self._order), handle, callback, args))
        return handle  # type: ignore[return-value]  # as far as anybody looks

    @staticmethod
    def _handle(
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        when_ns: int,
    ) -> _Handle:
        if context is None:
            return _Handle(callback, args, contextvars.copy_context(), _current.get(), when_ns)
        return _Handle(callback, args, context, context.get(_current), when_ns)

    # ---- what asyncio asks of a loop ------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **options)
        context = options.get("context")
        process = _current.get() if context is None else context.get(_current)
        if process is not None:
            if len(process.tasks) > 256:
                process.tasks = [each for each in process.tasks if not each.done()]
            process.tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._on_error(self._running, f"{context.get('message')}: {context.get('exception')!r}")

    # ---- readers and connections ----------------------------------------------------------

    def take_fd(self) -> int:
        """A number for something that will be readable; no real descriptor."""
        return next(self._next_fd)

    def readable(self, fd: int) -> None:
        """Call whoever reads it."""
        reader = self._readers.get(fd)
        if reader is not None:
            callback, args, context = reader
            self.call_soon(callback, *args, context=context)

    def add_reader(self, fd: Any, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        self._readers[fd] = (callback, args, contextvars.copy_context())

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], host: str, port: int, **_: Any
    ) -> tuple[Any, Any]:
        """asyncio.open_connection() ends here."""
        assert self.control is not None
        return await self.control.connect(current_process(), protocol_factory, host, port)

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], *_: Any, sock: socket.socket, **__: Any
    ) -> Any:
        """asyncio.start_server() ends here; the socket is a simulated one."""
        assert self.control is not None
        return self.control.listen(current_process(), protocol_factory, sock)
