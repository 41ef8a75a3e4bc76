"""What a rank says on stderr is kept, whatever it looks like."""

from __future__ import annotations

import asyncio

from pdx.ranks.rank import RankProcess


async def test_a_line_beyond_the_readers_limit_does_not_stop_the_reading() -> None:
    stream = asyncio.StreamReader(limit=1024)
    stream.feed_data(b"before\n" + b"x" * 5000 + b"\n")
    rank = RankProcess()
    reading = asyncio.create_task(rank._pump_stderr(stream))
    await asyncio.sleep(0)
    stream.feed_data(b"after\n")
    stream.feed_eof()
    await reading
    assert rank._stderr_lines[0] == "before"
    assert rank._stderr_lines[-1] == "after"
