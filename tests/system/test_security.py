"""Who may make a link, and what strangers and liars on the control port achieve: nothing."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdx.checkpoint.layers import full_attention
from pdx.messenger.authentication import decoder_code
from pdx.messenger.listener import MAX_STRANGERS
from pdx.messenger.messages import (
    MAX_OPENING_FRAME_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    Challenge,
    ControlMessage,
    Describe,
    Hello,
    Posted,
    Prefill,
    Proof,
    Refuse,
)
from pdx.request.frames import encode_frame, frame_decoder, recv_frame
from pdx.request.ids import IdArray
from tests.messenger.manifests import ONE_RANK
from tests.oracle.transformers_oracle import Oracle
from tests.system.nodes import Prefiller, decoder, prefiller, run_to_end
from tests.system.prompts import prompt_of

KV = ["--kv-memory", "16M"]
SECRET = "correct horse battery staple"
DECODER = frame_decoder(ControlMessage)
MANIFEST = msgspec.structs.replace(
    ONE_RANK, layer_groups=(full_attention(3),), num_kv_heads=2, head_dim=32, num_pages=8
)
HELLO = Hello(
    protocol=PROTOCOL_VERSION,
    node="liar",
    manifest=MANIFEST,
    host="h",
    pid=1,
    descriptors=[("tcp", b"x" * 64)],
    nonce=b"n" * 32,
)
PREFILL = Prefill(
    transfer_id=1,
    token_ids=IdArray([1]),
    first_position=0,
    page_indices=IdArray([0]),
    slot=1,
    generation=0,
    atoms_by_rank=[3],
)
POSTED = Posted(transfer_id=1, atoms=3, prefill_start_ns=0, last_layer_ns=0)
MESSAGES = [HELLO, Describe(), PREFILL, POSTED, Cancel(transfer_id=1), Proof(mac=b"m" * 32)]


@pytest.fixture(scope="module")
def guarded(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefiller]:
    """A prefiller with a secret, on all addresses."""
    log = tmp_path_factory.mktemp("guarded") / "prefill.log"
    with prefiller(tiny_llama, log, "--listen", "0.0.0.0:0", *KV, PDX_SECRET=SECRET) as node:
        yield node


def local_address(node: Prefiller) -> tuple[str, int]:
    return "127.0.0.1", int(node.address.rpartition(":")[2])


def test_a_node_off_loopback_needs_a_secret(tiny_llama: Path, tmp_path: Path) -> None:
    command = ["prefill", "--model", str(tiny_llama), "--listen", "0.0.0.0:0"]
    code, _, said = run_to_end(command, tmp_path / "log", timeout_s=10)
    assert code == 2
    assert "error: without a shared secret any host could use a control port on 0.0.0.0" in said
    assert "hint:" in said and "--secret-file" in said
    assert "loaded" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [("short\n", "fewer than 16"), (None, "cannot read the secret")],
)
def test_a_secret_that_is_none_is_a_usage_error(
    tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "secret"
    if text is not None:
        file.write_text(text)
    command = ["decode", "--peer", "127.0.0.1:1", "--secret-file", str(file)]
    code, _, said = run_to_end(command, tmp_path / "log", timeout_s=10)
    assert code == 2
    assert message in said


@pytest.mark.parametrize(
    ("secret", "message"),
    [(None, "asks for a secret"), ("another secret than that", "has another secret")],
)
def test_a_decoder_without_the_secret_is_refused(
    guarded: Prefiller, tmp_path: Path, secret: str | None, message: str
) -> None:
    host, port = local_address(guarded)
    own = []
    if secret is not None:
        (tmp_path / "secret").write_text(secret)
        own = ["--secret-file", str(tmp_path / "secret")]
    command = ["decode", "--peer", f"{host}:{port}", *own]
    code, _, said = run_to_end(command, tmp_path / "log", timeout_s=20)
    assert code == 1
    assert message in said
    assert "Traceback" not in said + guarded.stderr()


def test_a_decoder_with_a_secret_takes_no_prefiller_without_one(
    any_prefiller: Prefiller, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    command = ["decode", "--peer", any_prefiller.address, "--secret-file", str(tmp_path / "secret")]
    code, _, said = run_to_end(command, tmp_path / "log", timeout_s=20)
    assert code == 1
    assert "has no secret, this node has one" in said


def test_nodes_with_one_secret_serve(
    guarded: Prefiller, tmp_path: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    host, port = local_address(guarded)
    options = ["--secret-file", str(tmp_path / "secret"), "--no-local-fallback", *KV]
    prompt = prompt_of(tiny_prompt_ids, 40)
    with decoder(f"{host}:{port}", tmp_path / "decode.log", *options) as node:
        assert tiny_oracle.greedy(prompt, 16).agrees_with(node.complete(prompt, 16))
    assert SECRET not in guarded.stderr() + node.stderr()


@pytest.mark.timeout(400)  # four nodes start, on a machine that may be busy
def test_a_decoder_ends_only_when_all_of_its_prefillers_refuse_it(
    guarded: Prefiller,
    any_prefiller: Prefiller,
    tiny_llama: Path,
    tmp_path: Path,
    tiny_oracle: Oracle,
    tiny_prompt_ids: list[int],
) -> None:
    """The first asks for a secret, the second computes in another type, the third takes it."""
    host, port = local_address(guarded)
    prompt = prompt_of(tiny_prompt_ids, 40)
    options = ["--dtype", "float32", "--no-local-fallback", *KV]
    with prefiller(tiny_llama, tmp_path / "p.log", "--dtype", "bfloat16", *KV) as coarse:
        peers = f"{host}:{port},{coarse.address},{any_prefiller.address}"
        with decoder(peers, tmp_path / "d.log", *options) as node:
            assert tiny_oracle.greedy(prompt, 16).agrees_with(node.complete(prompt, 16))
            # All are asked at once: who refuses is heard before or after who answers.
            told = rf"without (the prefiller at )?{host}:{port}: |{host}:{port} refuses us"
            assert re.search(told, node.stderr())
            assert f"{coarse.address} refuses us: the two nodes do not match" in node.stderr()


def test_a_proof_is_good_for_one_challenge_and_one_hello(guarded: Prefiller) -> None:
    """What was seen on another connection, or of another Hello, proves nothing."""
    address = local_address(guarded)

    def challenged(opening: Hello) -> tuple[socket.socket, bytes]:
        sock = socket.create_connection(address, timeout=5)
        sock.sendall(encode_frame(opening))
        challenge = recv_frame(sock, DECODER, 1 << 20)
        assert isinstance(challenge, Challenge)
        return sock, challenge.nonce

    first, old_nonce = challenged(HELLO)
    first.close()
    other = msgspec.structs.replace(HELLO, descriptors=[("tcp", b"y" * 64)])
    for hello, nonce in ((HELLO, old_nonce), (other, None)):
        sock, fresh = challenged(HELLO)
        assert fresh != old_nonce
        with sock:
            sock.sendall(
                encode_frame(Proof(mac=decoder_code(SECRET.encode(), hello, nonce or fresh)))
            )
            answer = recv_frame(sock, DECODER, 1 << 20)
            assert isinstance(answer, Refuse)
            assert "another secret" in answer.reason
    assert guarded.status()["links_open"] == 0


@st.composite
def noise(draw: st.DrawFn) -> bytes:
    """Random bytes, or messages in any order, some of them cut short or with bytes changed."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=300))
    parts = []
    for message in draw(st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=4)):
        frame = bytearray(encode_frame(message))
        for place in draw(st.lists(st.integers(0, len(frame) - 1), max_size=2)):
            frame[place] = draw(st.integers(0, 255))
        parts.append(bytes(frame[: draw(st.integers(1, len(frame)))]))
    return b"".join(parts)


@pytest.mark.parametrize("is_guarded", [False, True])
def test_noise_on_the_control_port_leaks_nothing_and_hangs_nothing(
    guarded: Prefiller,
    any_prefiller: Prefiller,
    is_guarded: bool,
) -> None:
    node = guarded if is_guarded else any_prefiller

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(noise())
    def try_it(sent: bytes) -> None:
        with (
            socket.create_connection(local_address(node), timeout=10) as stranger,
            contextlib.suppress(ConnectionError),
        ):
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass

    try_it()
    node.wait_status(lambda status: status["links_open"] == 0, what="no link is left")
    node.wait_clean()
    assert "Traceback" not in node.stderr()


def test_idle_strangers_keep_no_peer_out_and_take_bounded_memory(
    guarded: Prefiller, tmp_path: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    """Each of 1,200 connections begins an opening of the greatest length, and never ends it."""
    (tmp_path / "secret").write_text(SECRET)
    host, port = local_address(guarded)
    begun = struct.pack("<I", MAX_OPENING_FRAME_BYTES) + bytes(100_000)
    num_strangers, options = 600, ["--secret-file", str(tmp_path / "secret"), *KV]
    prompt = prompt_of(tiny_prompt_ids, 40)
    with contextlib.ExitStack() as stack:
        before, num_come = guarded.status()["faults_bad_connection"], 0

        def strangers_come() -> None:
            nonlocal num_come
            num_come += num_strangers
            for _ in range(num_strangers):
                stranger = stack.enter_context(socket.create_connection((host, port), timeout=5))
                stranger.setblocking(False)
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    stranger.send(begun)
            closed = before + num_come - MAX_STRANGERS
            guarded.wait_status(
                lambda status: status["faults_bad_connection"] >= closed,
                what="the oldest strangers are closed",
            )

        strangers_come()
        with decoder(
            f"{host}:{port}", tmp_path / "decode.log", "--no-local-fallback", *options
        ) as node:
            assert tiny_oracle.greedy(prompt, 16).agrees_with(node.complete(prompt, 16))
            full_bytes = resident_bytes(guarded.pid)
            strangers_come()
            num_open = len(list(Path(f"/proc/{guarded.pid}/fd").iterdir()))
            assert num_open < MAX_STRANGERS + 100
            assert resident_bytes(guarded.pid) - full_bytes < num_strangers * len(begun) // 4


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_an_opening_longer_than_any_is_refused_before_it_is_read(any_prefiller: Prefiller) -> None:
    with socket.create_connection(local_address(any_prefiller), timeout=5) as stranger:
        stranger.sendall(struct.pack("<I", 1 << 20))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
