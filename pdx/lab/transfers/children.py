"""Systems that run in processes of their own: memcpy, raw libfabric, NIXL, Mooncake.

Each gets a line for each cell on its input and answers with one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Final

from pdx.errors import ConfigError, FabricError
from pdx.fabric.interface import Provider
from pdx.fabric.native_fabric import library_info
from pdx.lab.transfers.pattern import Cell, Memory
from pdx.lab.transfers.systems import Sample, System, end_process

__all__ = ["COMPARISONS", "open_systems"]

COMPARISONS: Final = ("memcpy", "raw", "nixl", "mooncake")
_ANSWER_S = 90.0
_HERE = Path(__file__).parent
#: Peers log to the process's output where nothing else is said.
_QUIET = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error", "GLOG_minloglevel": "2"}


class ChildSystem:
    """One process, or a group of them, behind a pipe.

    Args:
        polls: it goes on polling after its answer, and is stopped while others are measured. (It
            must then see to it that it dies with us.)
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        encode: Callable[[Cell], str],
        *,
        memory: Memory,
        polls: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._polls = polls
        self._encode = encode
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this system
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | dict(env or {}),
            pass_fds=(memory.source_fd, memory.target_fd),
            process_group=0,
        )

    def measure(self, cell: Cell) -> Sample:
        """See :meth:`System.measure`."""
        self._signal(signal.SIGCONT)
        try:
            answer = self._ask(self._encode(cell))
        finally:
            if self._polls:
                self._signal(signal.SIGSTOP)
        atoms = int(answer["pages"])
        return Sample(
            atoms=atoms,
            num_bytes=atoms * cell.page_bytes,
            seconds=float(answer["seconds"]),
            wrong=int(answer["bad"]),
        )

    def close(self) -> None:
        """See :meth:`System.close`."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        end_process(self._process)
        self._signal(signal.SIGKILL)
        self._process.stdout.close()
        self._errors.close()

    def _ask(self, line: str) -> dict[str, float]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._failure("has ended") from None
        if not select.select([stdout], [], [], _ANSWER_S)[0]:
            raise self._failure(f"has not answered for {_ANSWER_S:g} s")
        try:
            answer = json.loads(stdout.readline())
            return {name: float(answer[name]) for name in ("pages", "seconds", "bad")}
        except (ValueError, KeyError, TypeError):
            raise self._failure("has failed") from None

    def _failure(self, what: str) -> FabricError:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return FabricError(f"{self.name} {what}{': ' + lines[-1] if lines else ''}")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def open_systems(
    comparison: str, provider: Provider, pool_bytes: int, memory: Memory, python: str | None
) -> list[System]:
    """The systems of one word of ``--compare``.

    Args:
        memory: what they write from and to, `pool_bytes` each.
        python: the interpreter that has the peers' packages; None: this one.

    Raises:
        ConfigError: what it needs is not installed.
    """
    match comparison:
        case "memcpy":
            return [
                ChildSystem(
                    "memcpy",
                    _raw_command("memcpy", pool_bytes, memory),
                    _raw_line(1),
                    memory=memory,
                )
            ]
        case "raw":
            command = _raw_command(library_info().providers[provider], pool_bytes, memory)
            return [
                ChildSystem("raw", command, _raw_line(1), memory=memory),
                ChildSystem("raw x4", command, _raw_line(4), memory=memory),
            ]
        case "nixl" | "mooncake":
            return _peers(comparison, provider, pool_bytes, memory, python or sys.executable)
    raise ConfigError(f"--compare {comparison}: it can be {', '.join(COMPARISONS)}")


def _raw_command(what: str, pool_bytes: int, memory: Memory) -> list[str]:
    files = str(memory.source_fd), str(memory.target_fd)
    return [str(_raw_program()), what, str(pool_bytes), *files]


def _raw_line(pages_per_write: int) -> Callable[[Cell], str]:
    def encode(cell: Cell) -> str:
        batch_atoms = cell.batch_pages * cell.layers
        return f"{cell.page_bytes} {pages_per_write} {batch_atoms} {cell.seconds} {cell.number}"

    return encode


def _raw_program() -> Path:
    """The C program, built against the libfabric that this process uses, once for each library.

    The linker writes the library's folder into the program, so a checkout that brings its own
    library has a program of its own: another's would end with the folder it was built in.
    """
    library = library_info()
    source = _HERE / "raw.c"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdx"
    made_of = blake2b(f"{library.version} {library.path}".encode(), digest_size=8)
    made_of.update(source.read_bytes())
    built = cache / f"raw-libfabric-{made_of.hexdigest()}"
    if built.exists():
        return built
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise ConfigError(
            "--compare memcpy and raw need a C compiler", hint="apt-get install gcc libfabric-dev"
        )
    cache.mkdir(parents=True, exist_ok=True)
    library_path = Path(library.path)
    link = (
        [library.path, f"-Wl,-rpath,{library_path.parent}"]
        if library_path.is_absolute()
        else [f"-l:{library.path}"]
    )
    own = built.with_suffix(f".{os.getpid()}")
    run = subprocess.run(
        [compiler, "-O2", "-o", str(own), str(source), *link],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if run.returncode:
        first = next((line for line in run.stderr.splitlines() if "error" in line), run.stderr)
        raise ConfigError(
            f"the raw program does not compile: {first.strip()}",
            hint="apt-get install libfabric-dev (it has rdma/fabric.h)",
        )
    own.replace(built)
    return built


def _peers(
    comparison: str, provider: Provider, pool_bytes: int, memory: Memory, python: str
) -> list[System]:
    module = {"nixl": "nixl._api", "mooncake": "mooncake.engine"}[comparison]
    try:
        run = subprocess.run(
            [python, "-c", f"import {module}"],
            capture_output=True,
            env=os.environ | _QUIET,
            check=False,
            timeout=60,
        )
    except OSError as error:
        raise ConfigError(f"--peers-python {python} does not run: {error.strerror}") from error
    # NIXL may crash at the interpreter's exit, after the import went well.
    if run.returncode > 0:
        raise ConfigError(
            f"{comparison} is not installed for {python}",
            hint="install it in an environment of its own, and name that with --peers-python",
        )
    command = [
        *(python, str(_HERE / "peers.py"), comparison, "--pool-bytes", str(pool_bytes)),
        *("--source-fd", str(memory.source_fd), "--target-fd", str(memory.target_fd)),
    ]
    env = (
        _QUIET
        | {"UCX_NET_DEVICES": "lo"}
        | ({"UCX_TLS": Provider.TCP} if provider == Provider.TCP else {})
    )

    def encode(cell: Cell) -> str:
        return json.dumps(asdict(cell))

    if comparison == "mooncake":
        return [ChildSystem("Mooncake", command, encode, memory=memory, polls=True, env=env)]
    return [
        ChildSystem(name, argv, encode, memory=memory, polls=True, env=env)
        for name, argv in (
            ("NIXL", [*command, "--no-progress-thread"]),
            ("NIXL, progress thread", command),
        )
    ]
