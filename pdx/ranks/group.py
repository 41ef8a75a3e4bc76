"""All ranks of a node as one: they load together, run each pass together, and end together.

Runs on the primary's event loop. Rank 0 leads: it samples, and its answer to a pass is the pass's.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable

import msgspec

from pdx.errors import SiblingLost, WorkerError
from pdx.ranks.memory import RankDescriptors
from pdx.ranks.rank import RankProcess
from pdx.request.batch import Batch, StepOutput
from pdx.request.frames import encode_frame
from pdx.request.rank import RankConfig, RankLoading, RankReady

__all__ = ["RankGroup"]

#: When one rank has failed, the others have this long to say why: its failure may be theirs.
_OTHERS_S = 1.0


class RankGroup:
    """Owns the rank processes."""

    def __init__(self, tp_size: int) -> None:
        self._ranks = [
            RankProcess("the rank" if tp_size == 1 else f"rank {i} of {tp_size}")
            for i in range(tp_size)
        ]

    @property
    def pids(self) -> list[int]:
        """Process ids of the started ranks, the leader's first."""
        return [rank.pid for rank in self._ranks]

    @property
    def descriptors(self) -> list[RankDescriptors]:
        """The memory of each rank, once started; whoever takes it closes it."""
        taken = [rank.descriptors for rank in self._ranks if rank.descriptors is not None]
        assert len(taken) == len(self._ranks)
        return taken

    async def start(
        self, config: RankConfig, on_loading: Callable[[RankLoading], None]
    ) -> RankReady:
        """Start all ranks and wait until the model is loaded; the leader's answer.

        Args:
            config: of the leader; each rank gets its own place in the group.
            on_loading: told of the leader's progress, which is as far as the others'.

        Raises:
            PdxError: of the class that a rank reported, or WorkerError if one died.
        """
        # Where the ranks find each other; they have no need of it once they are connected.
        folder = tempfile.mkdtemp(prefix="pdx-ranks-")
        starts = [
            asyncio.create_task(
                rank.start(self._place(config, i, folder), on_loading if i == 0 else _ignore)
            )
            for i, rank in enumerate(self._ranks)
        ]
        try:
            await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            errors = _errors(starts)
            if errors:
                await asyncio.wait(starts, timeout=_OTHERS_S)
                raise _cause(_errors(starts))
            ready = [task.result() for task in starts]
        finally:
            for task in starts:
                task.cancel()
            await asyncio.wait(starts)
            shutil.rmtree(folder, ignore_errors=True)
        if len({(each.num_pages, each.kv_bytes, each.kv_alignment) for each in ready}) != 1:
            raise WorkerError(f"the ranks have KV memories of different sizes: {ready}")
        return ready[0]

    async def run(self, batch: Batch) -> StepOutput:
        """Run one pass on all ranks.

        Raises:
            PdxError: a rank failed or died; the node must stop.
        """
        frame = encode_frame(batch)
        try:
            for rank in self._ranks:
                await rank.send_pass(frame)
            outputs = [await rank.receive_pass(batch.pass_idx) for rank in self._ranks]
        except SiblingLost as error:
            words = [asyncio.create_task(rank.last_words()) for rank in self._ranks]
            done, pending = await asyncio.wait(words, timeout=_OTHERS_S)
            for task in pending:
                task.cancel()
            raise _cause([error, *(task.result() for task in done)]) from None
        return outputs[0]

    async def died(self) -> WorkerError:
        """Wait until a rank ends, which none should; returns why."""
        ends = [asyncio.create_task(rank.died()) for rank in self._ranks]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            done = [(rank, end) for rank, end in zip(self._ranks, ends, strict=True) if end.done()]
            # One that was killed (a negative code) is the cause of its siblings' ends.
            _, first = min(done, key=lambda pair: pair[0].exit_code)
            return first.result()
        finally:
            for task in ends:
                task.cancel()

    async def stop(self) -> None:
        """End all ranks. Keeps their memory mapped."""
        await asyncio.gather(*(rank.stop() for rank in self._ranks))

    def _place(self, config: RankConfig, rank_idx: int, folder: str) -> RankConfig:
        """The configuration of one rank."""
        return msgspec.structs.replace(
            config, tp_rank=rank_idx, tp_size=len(self._ranks), rendezvous=f"{folder}/store"
        )


def _ignore(loading: RankLoading) -> None:
    """Nobody is told how far the ranks that do not lead have loaded."""


def _errors(tasks: list[asyncio.Task[RankReady]]) -> list[BaseException]:
    return [error for task in tasks if task.done() and (error := task.exception()) is not None]


def _cause(errors: list[BaseException]) -> BaseException:
    """The first that does not only tell of another rank's end."""
    return next((error for error in errors if not isinstance(error, SiblingLost)), errors[0])
