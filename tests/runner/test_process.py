"""The rank's life up to readiness and its channel, run in this process."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.quantization import Float8Blocks
from pdx.errors import CheckpointError, ConfigError, InternalError, PdxError, ProtocolError
from pdx.kv.geometry import kv_layout, num_pages_in
from pdx.request.batch import Batch
from pdx.request.frames import MAX_LOCAL_FRAME_BYTES, encode_frame, recv_frame
from pdx.request.rank import FromRank, RankConfig, RankLoading, RankReady
from pdx.runner.channel import Channel
from pdx.runner.process import check_weights, serve
from tests.runner.rank_process import rank_config

EMPTY_BATCH = Batch(pass_idx=1, starts=[], steps=[], removes=[])


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Channel]]:
    """The primary's socket and the rank's channel."""
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    with ours, theirs:
        yield ours, Channel(theirs)


def serve_until_closed(ours: socket.socket, channel: Channel, config: RankConfig) -> RankReady:
    """Run a rank that gets nothing after its configuration; its answer."""
    ours.sendall(encode_frame(config))
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(SystemExit) as ended:
        serve(channel)
    assert ended.value.code == 0
    decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
    while True:
        message = recv_frame(ours, decoder, MAX_LOCAL_FRAME_BYTES)
        if not isinstance(message, RankLoading):
            assert isinstance(message, RankReady)
            return message


def test_page_count_is_what_the_memory_holds(
    pair: tuple[socket.socket, Channel], tiny_llama: Path
) -> None:
    page_bytes = kv_layout(ModelConfig.load(tiny_llama), 16, 1, "bfloat16").total_bytes
    config = rank_config(
        tiny_llama, num_pages=None, kv_memory_bytes=5 * page_bytes + 1, dtype="bfloat16"
    )
    ready = serve_until_closed(*pair, config)
    assert (ready.num_pages, ready.kv_bytes) == (5, 5 * page_bytes)


@pytest.mark.parametrize(
    ("changes", "kind", "named"),
    [
        ({"device": "cuda"}, ConfigError, "cuda"),
        ({"num_pages": None, "kv_memory_bytes": 100}, ConfigError, "100 bytes"),
        ({"num_pages": 0}, ConfigError, "0 KV pages"),
        ({"page_size": 0}, ConfigError, "page size 0"),
        ({"dtype": "int8"}, ConfigError, "int8"),
        ({"model_folder": "/nowhere"}, CheckpointError, "/nowhere/config.json"),
    ],
)
def test_configuration_that_cannot_be_served_is_refused(
    changes: dict[str, object],
    kind: type[PdxError],
    named: str,
    pair: tuple[socket.socket, Channel],
    tiny_llama: Path,
) -> None:
    ours, channel = pair
    ours.sendall(encode_frame(rank_config(tiny_llama, **changes)))
    with pytest.raises(kind, match=named):
        serve(channel)


def test_pages_in_memory(tiny_llama: Path) -> None:
    config = ModelConfig.load(tiny_llama)
    one = kv_layout(config, 16, 1, "float32").total_bytes
    assert one == 3 * 2 * 2 * 16 * 32 * 4
    assert [num_pages_in(config, 16, n, "float32") for n in (0, one - 1, one, 3 * one - 1)] == [
        0,
        0,
        1,
        2,
    ]


def test_channel_refuses_messages_out_of_order(
    pair: tuple[socket.socket, Channel], tiny_llama: Path
) -> None:
    ours, channel = pair
    ours.sendall(encode_frame(EMPTY_BATCH) + encode_frame(rank_config(tiny_llama)))
    with pytest.raises(InternalError, match="Batch before its RankConfig"):
        channel.receive_config()
    with pytest.raises(InternalError, match="RankConfig"):
        channel.receive_batch()


def test_channel_refuses_what_is_no_message(pair: tuple[socket.socket, Channel]) -> None:
    ours, channel = pair
    ours.sendall(b"\x03\x00\x00\x00abc")
    with pytest.raises(ProtocolError):
        channel.receive_config()


@pytest.mark.parametrize("partial", [b"", b"\x03", b"\x03\x00\x00\x00a"])
def test_channel_ends_the_process_when_the_primary_is_gone(
    partial: bytes, pair: tuple[socket.socket, Channel]
) -> None:
    ours, channel = pair
    ours.sendall(partial)
    ours.close()
    with pytest.raises(SystemExit) as ended:
        channel.receive_batch()
    assert ended.value.code == 0
    with pytest.raises(SystemExit):
        channel.send(RankLoading(done_bytes=0, total_bytes=1))


def test_float8_weights_are_refused_where_kernels_over_them_do_not_compile(
    tiny_llama: Path,
) -> None:
    plain = ModelConfig.load(tiny_llama)
    float8 = dataclasses.replace(plain, quantization=Float8Blocks(num_rows=128, num_columns=128))
    check_weights(plain, (8, 0))
    check_weights(float8, (9, 0))
    with pytest.raises(
        ConfigError, match=r"float8 weights needs .* 9\.0 or newer, not 8\.0"
    ) as told:
        check_weights(float8, (8, 0))
    assert told.value.hint is not None
    assert "--device cpu" in told.value.hint
