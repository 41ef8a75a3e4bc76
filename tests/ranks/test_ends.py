"""How ranks end when they should not, on real processes: the cause is told, with what they said."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pdx.errors import InternalError, WorkerError
from pdx.ranks import child
from pdx.ranks.child import start_child, stop_child
from pdx.ranks.group import RankGroup
from pdx.request.batch import Batch
from tests.runner.rank_process import rank_config


async def test_a_child_that_hangs_leaves_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    process, sock = await start_child("tests.ranks.hanging_child", stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    assert await process.stderr.readline() == b"hanging\n"
    sock.close()
    monkeypatch.setattr(child, "_STOP_S", 0.1)
    await stop_child(process)
    said = (await process.stderr.read()).decode()
    assert "Fatal Python error: Aborted" in said
    assert "hang_here" in said


async def test_a_rank_that_crashes_is_named_with_its_last_words(tiny_llama: Path) -> None:
    group = RankGroup(2)
    try:
        await group.start(rank_config(tiny_llama), lambda loading: None)
        victim = group.pids[1]
        death = asyncio.create_task(group.died())
        os.kill(victim, signal.SIGSEGV)
        error = await death
        assert error.message.startswith(f"rank 1 of 2 (pid {victim}) was killed by SIGSEGV")
        assert "Fatal Python error: Segmentation fault" in error.message
        assert "pdx/runner" in error.message
        with pytest.raises(WorkerError, match="rank 1 of 2"):
            await group.run(Batch(pass_idx=1, starts=[], steps=[], removes=[]))
    finally:
        await group.stop()
        for descriptors in group.descriptors:
            descriptors.close()


async def test_a_rank_that_raises_tells_what_and_leaves_its_traceback_in_the_log(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = RankGroup(1)
    try:
        await group.start(rank_config(tiny_llama), lambda loading: None)
        with pytest.raises(InternalError, match="pass 5 came after pass 0"):
            await group.run(Batch(pass_idx=5, starts=[], steps=[], removes=[]))
    finally:
        await group.stop()
        for descriptors in group.descriptors:
            descriptors.close()
    said = "\n".join(caplog.messages)
    assert "Traceback (most recent call last)" in said
    assert "pdx/runner/requests.py" in said
