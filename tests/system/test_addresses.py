"""Addresses, ports, the order of starting, and strangers on the control port."""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from pdx.host.addresses import host_addresses
from tests.system.conftest import Generate, Pair
from tests.system.nodes import (
    Node,
    Prefiller,
    decoder,
    end,
    moved,
    prefiller,
    read_announcement,
    run_to_end,
    start,
    wait_until,
)
from tests.system.prompts import prompt_of

KV = ["--kv-memory", "16M"]
#: Of the small prefiller: 96 tokens.
FEW_PAGES, PAGE = 6, 16


def warnings_of(node: Node) -> list[str]:
    """Lines of the log that warn."""
    lines = node.stderr().splitlines()
    return [line for line in lines if re.match(r"\S+ \S+ [WE] ", line)]


@pytest.fixture(scope="module")
def small_ipv6_pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Nodes on IPv6, over the network provider; the prefiller has fewer pages than the decoder."""
    logs = tmp_path_factory.mktemp("ipv6")
    small = ["--listen", "[::1]:0", "--fabric", "tcp", "--pages", str(FEW_PAGES)]
    with (
        prefiller(tiny_llama, logs / "prefill.log", *small) as source,
        decoder(source.address, logs / "decode.log", "--http", "[::1]:0", *KV) as target,
    ):
        yield Pair(source, target, "tcp")


def test_nodes_on_ipv6_print_addresses_that_can_be_pasted(
    small_ipv6_pair: Pair, colocated: Generate, tiny_prompt_ids: list[int]
) -> None:
    assert small_ipv6_pair.prefiller.address.startswith("[::1]:")
    assert small_ipv6_pair.decoder.url.startswith("http://[::1]:")
    prompt = prompt_of(tiny_prompt_ids, 40)
    assert small_ipv6_pair.decoder.complete(prompt, 24) == colocated(prompt, 24)


def test_prompt_past_what_the_prefiller_holds_is_refused_with_its_limit(
    small_ipv6_pair: Pair, colocated: Generate, tiny_prompt_ids: list[int]
) -> None:
    """Nothing is cut off. All but the prompt's last token are prefilled."""
    node, limit = small_ipv6_pair.decoder, FEW_PAGES * PAGE
    call = node.call(prompt_of(tiny_prompt_ids, limit + 2), 4, stream=True)
    status, body = call.answer()
    assert status == 400
    assert f"what the prefiller holds ({limit})" in body["error"]["message"]
    fits = prompt_of(tiny_prompt_ids, limit + 1)
    assert node.complete(fits, 4) == colocated(fits, 4)
    node.wait_clean()
    small_ipv6_pair.prefiller.wait_clean()


def test_a_bare_port_is_on_loopback_and_a_taken_one_ends_at_once(
    any_prefiller: Prefiller, tiny_llama: Path, tmp_path: Path
) -> None:
    """It fails before the model is loaded."""
    port = any_prefiller.address.rpartition(":")[2]
    listen = ["prefill", "--model", str(tiny_llama), "--listen", f":{port}"]
    code, _, said = run_to_end(listen, tmp_path / "prefill.log", timeout_s=10)
    assert code == 1
    assert f"127.0.0.1 port {port}: the address is already in use" in said
    assert "hint:" in said
    assert "loaded" not in said


def test_a_taken_http_address_is_named(any_prefiller: Prefiller, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--peer", any_prefiller.address, "--http", f":{port}", *KV]
        code, _, said = run_to_end(["decode", *options], tmp_path / "decode.log", timeout_s=30)
    assert code == 1
    assert f"127.0.0.1 port {port}: the address is already in use" in said
    any_prefiller.wait_clean()


def test_prefillers_without_port_options_find_their_own(
    any_prefiller: Prefiller, pair: Pair
) -> None:
    nodes = (any_prefiller, pair.prefiller)
    ports = {node.address.rpartition(":")[2] for node in nodes}
    assert len(ports) == 2
    assert all(node.status()["requests_active"] == 0 for node in nodes)


@pytest.mark.parametrize("peer", ["::1:7001", "localhost:none", "host:70000"])
def test_an_address_that_is_none_is_a_usage_error(peer: str, tmp_path: Path) -> None:
    code, _, said = run_to_end(["decode", "--peer", peer], tmp_path / "decode.log", timeout_s=10)
    assert code == 2
    assert f"error: {peer!r} is not an address" in said
    assert "hint:" in said


def test_unreachable_peer_is_retried_visibly_and_then_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        peer = f"127.0.0.1:{unused.getsockname()[1]}"
    code, seconds, said = run_to_end(
        ["decode", "--peer", peer, "--peer-timeout", "1"], tmp_path / "decode.log", timeout_s=20
    )
    assert code == 1
    assert 1 <= seconds < 5
    assert said.count(f"waiting for the prefiller at {peer}") == 1
    assert f"error: no prefiller at {peer} in 1 s" in said
    assert f"--listen {peer}" in said


def test_prefiller_that_does_not_answer_yet_is_waited_for_visibly(tmp_path: Path) -> None:
    """While it loads its model it listens already."""
    with socket.create_server(("127.0.0.1", 0)) as loading:
        peer = f"127.0.0.1:{loading.getsockname()[1]}"
        command = ["decode", "--peer", peer, "--peer-timeout", "1"]
        code, _, said = run_to_end(command, tmp_path / "decode.log", timeout_s=20)
    assert code == 1
    assert f"no prefiller at {peer} in 1 s ({peer}: it does not answer; while it loads" in said


def test_decoder_started_before_its_prefiller(
    tiny_llama: Path, tmp_path: Path, colocated: Generate, tiny_prompt_ids: list[int]
) -> None:
    """It says once what it waits for, and goes on by itself; nobody warns of this usual order."""
    prompt = prompt_of(tiny_prompt_ids, 40)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        peer = f"127.0.0.1:{unused.getsockname()[1]}"
    log = tmp_path / "decode.log"
    with ThreadPoolExecutor(1) as thread, ExitStack() as nodes:
        waiting = thread.submit(nodes.enter_context, decoder(f"localhost:{peer[10:]}", log, *KV))
        wait_until(
            lambda: log.exists() and "waiting for the prefiller" in log.read_text(),
            timeout_s=10,
            what="the decoder says that it waits",
        )
        source = nodes.enter_context(
            prefiller(tiny_llama, tmp_path / "prefill.log", "--listen", peer, *KV)
        )
        node = waiting.result(timeout=30)
        assert node.complete(prompt, 24) == colocated(prompt, 24)
        assert source.status()["faults_bad_connection"] == 0
        assert node.stderr().count("waiting for the prefiller") == 1
        assert not [line for each in (source, node) for line in warnings_of(each)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_started_at_once_ten_times(
    tiny_llama: Path, tmp_path: Path, colocated: Generate, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 40)
    for i in range(10):
        with socket.create_server(("127.0.0.1", 0)) as unused:
            peer = f"127.0.0.1:{unused.getsockname()[1]}"
        with ThreadPoolExecutor(1) as thread, ExitStack() as nodes:
            later = decoder(peer, tmp_path / f"decode-{i}.log", *KV)
            waiting = thread.submit(nodes.enter_context, later)
            log = tmp_path / f"prefill-{i}.log"
            nodes.enter_context(prefiller(tiny_llama, log, "--listen", peer, *KV))
            assert waiting.result(timeout=30).complete(prompt, 24) == colocated(prompt, 24)


@pytest.mark.parametrize(
    "sent",
    [
        bytes(range(7, 255)),
        b"GET /" + bytes(20000),
        struct.pack("<I", 100) + b"half a frame",
        struct.pack("<I", 2**32 - 1) + b"x" * 1000,
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        b"\x00\x00\x00\x00",
    ],
    ids=["bytes", "long http", "half", "4GiB", "not msgpack", "empty"],
)
def test_strangers_on_the_control_port_are_closed_and_counted(
    pair: Pair, colocated: Generate, tiny_prompt_ids: list[int], sent: bytes
) -> None:
    source = pair.prefiller
    host, port = source.address.rsplit(":", 1)
    assert host == "127.0.0.1"
    before, faults = source.status()["faults_bad_connection"], source.faults()
    with socket.create_connection((host, int(port)), timeout=5) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # closed before all had been read
            assert stranger.recv(1) == b""
    source.wait_status(lambda s: s["faults_bad_connection"] == before + 1, what="it is counted")
    assert moved(source, faults) == {"bad_connection": 1}
    assert "closed:" in source.stderr().rpartition("connection from")[2]
    prompt = prompt_of(tiny_prompt_ids, 40)
    assert pair.decoder.complete(prompt, 24) == colocated(prompt, 24)


def test_many_strangers_are_counted_in_a_few_lines(any_prefiller: Prefiller) -> None:
    host, port = any_prefiller.address.rsplit(":", 1)
    before = any_prefiller.status()["faults_bad_connection"]
    lines = len(any_prefiller.stderr().splitlines())
    for _ in range(100):
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(b"\xff" * 100)
            with contextlib.suppress(ConnectionResetError):
                stranger.recv(1)
    any_prefiller.wait_status(
        lambda status: status["faults_bad_connection"] >= before + 100, what="all are counted"
    )
    said = any_prefiller.stderr().splitlines()[lines:]
    assert len([line for line in said if " closed: " in line]) <= 4, said


def test_http_on_the_control_port_is_answered(any_prefiller: Prefiller) -> None:
    url = f"http://{any_prefiller.address}"
    health = httpx.get(f"{url}/health")
    assert health.status_code == 200
    assert health.json()["status"] == "ok"
    assert health.json()["counts"]["pages_leased"] == 0
    metrics = httpx.get(f"{url}/metrics?x=1").text
    assert 'pdx_pages{state="free"}' in metrics
    assert 'pdx_node_level{what="links_open"}' in metrics
    assert httpx.head(f"{url}/health").text == ""
    assert [httpx.get(f"{url}/{each}").text for each in ("livez", "readyz")] == ["ok\n", "ok\n"]
    other = httpx.get(url)
    assert other.status_code == 404
    assert "/health, /metrics" in other.text


def test_a_stranger_that_says_nothing_does_not_disturb_the_end(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with prefiller(tiny_llama, tmp_path / "prefill.log", *KV) as node:
        host, _, port = node.address.rpartition(":")
        with socket.create_connection((host, int(port))):
            node.status()  # its loop has taken the connection by now
            assert node.stop() == 0
        assert "Traceback" not in node.stderr()


@pytest.mark.slow
def test_nodes_with_several_network_cards_stripe_over_them(
    tiny_llama: Path, tmp_path: Path, colocated: Generate, tiny_prompt_ids: list[int]
) -> None:
    """Two addresses on one side, three on the other."""
    tcp = ["--fabric", "tcp", *KV]
    two = ["--fabric-bind", "127.0.0.1", "--fabric-bind", "127.0.0.2"]
    three = [*two, "--fabric-bind", "127.0.0.3", "--fabric-core", "0"]
    with (
        prefiller(tiny_llama, tmp_path / "prefill.log", *tcp, *two) as source,
        decoder(source.address, tmp_path / "decode.log", *tcp, *three) as target,
    ):
        for length in (40, 200):
            prompt = prompt_of(tiny_prompt_ids, length)
            assert target.complete(prompt, 8) == colocated(prompt, 8)


def test_the_line_to_paste_works_as_pasted(
    tiny_llama: Path, tmp_path: Path, colocated: Generate, tiny_prompt_ids: list[int]
) -> None:
    """From another folder too; with an address that other hosts reach where it listens on all."""
    secret = tmp_path / "the secret's file"
    secret.write_text("correct horse battery staple")
    listen = ["--listen", "0.0.0.0:0", "--secret-file", secret.name, *KV]
    with (
        contextlib.chdir(tmp_path),
        prefiller(tiny_llama, tmp_path / "prefill.log", *listen) as source,
    ):
        words = shlex.split(source.announced)
        assert words[:3] == ["pdx", "decode", "--peer"]
        assert words[4:] == ["--secret-file", str(secret)]
        own = [str(each.address) for each in host_addresses() if each.address.version == 4]
        outer = [
            str(e.address) for e in host_addresses() if e.address.version == 4 and e.reaches_out
        ]
        host = source.address.rpartition(":")[0]
        assert host in (outer or own)
        for other in {*outer} - {host}:
            assert other in source.stderr()
        with contextlib.chdir("/"):
            node = start(words[1:] + KV, tmp_path / "decode.log")
            try:
                url = read_announcement(node, r"http://\S+/v1")
                body = {"prompt": prompt_of(tiny_prompt_ids, 40), "max_tokens": 4, "temperature": 0}
                body |= {"ignore_eos": True, "return_token_ids": True}
                answer = httpx.post(f"{url}/completions", json=body, timeout=30).json()
            finally:
                end(node)
    assert answer["choices"][0]["token_ids"] == colocated(body["prompt"], 4)


@pytest.mark.parametrize("check", [[], ["--check"]], ids=["start", "check"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_data_address_that_is_not_this_hosts_is_refused_before_anything_is_started(
    role: str, check: list[str], tiny_llama: Path, tmp_path: Path
) -> None:
    """The setting and the addresses that there are, are named; a good one beside it is no help."""
    command = [role, "--model", str(tiny_llama), "--fabric-bind", "127.0.0.1"]
    command += ["--fabric-bind", "10.99.99.99", *check]
    command += ["--peer", "127.0.0.1:1"] if role == "decode" else []
    code, seconds, said = run_to_end(command, tmp_path / "log", timeout_s=20)
    assert code != 0
    assert "'10.99.99.99', which is no address of this host" in said
    assert "127.0.0.1 (lo)" in said
    assert "waiting" not in said and "serving" not in said and "Traceback" not in said
    if not check:
        assert code == 1 and "--fabric-bind" in said
    assert seconds < 10


@pytest.mark.parametrize(
    "arguments", [["prefill", "--model", "{model}"], ["decode", "--peer", "127.0.0.1:1"]]
)
def test_a_node_without_libfabric_ends_at_once_and_says_so(
    arguments: list[str], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that serves, and cannot send."""
    monkeypatch.setenv("PDX_LIBFABRIC", "/no/such/libfabric.so")
    arguments = [argument.format(model=tiny_llama) for argument in arguments]
    code, _, said = run_to_end(arguments, tmp_path / "node.log", timeout_s=30)
    assert code == 1
    assert "/no/such/libfabric.so" in said
    assert "PDX_LIBFABRIC" in said
    assert "serving" not in said and "Traceback" not in said
