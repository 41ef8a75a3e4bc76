"""A decoder that connects again, as after a broken network that the prefiller has not noticed."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest

from pdx.checkpoint.layers import full_attention
from pdx.fabric import open_fabric
from pdx.messenger.manifest import Manifest, model_id, text_id
from pdx.messenger.messages import PROTOCOL_VERSION, ControlMessage, Goodbye, Hello, Welcome
from pdx.request.frames import encode_frame, frame_decoder, recv_frame
from tests.system.nodes import Prefiller, wait_until

DECODER = frame_decoder(ControlMessage)


def test_a_decoder_that_connects_again_ends_its_older_link(
    any_prefiller: Prefiller, tiny_llama: Path
) -> None:
    """Another decoder's stays."""
    manifest = Manifest(
        weights_id=model_id(tiny_llama),
        text_id=text_id(tiny_llama),
        layer_groups=(full_attention(3),),
        num_kv_heads=2,
        head_dim=32,
        dtype="float32",
        page_size=16,
        tp_size=1,
        kv_layout="head-major",
        num_pages=8,
    )
    before = any_prefiller.status()["links_open"]
    memory = np.zeros(manifest.layout().total_bytes, np.uint8)
    fabric = open_fabric(provider="tcp")
    region = fabric.register(memory.ctypes.data, memory.nbytes)
    host, _, port = any_prefiller.address.rpartition(":")

    def linked(node: str) -> socket.socket:
        link = fabric.open_link(region)
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            node=node,
            manifest=manifest,
            host="elsewhere",
            pid=1,
            descriptors=[("tcp", fabric.descriptor(link))],
            nonce=b"n" * 32,
        )
        control = socket.create_connection((host, int(port)), timeout=10)
        control.sendall(encode_frame(hello))
        welcome = recv_frame(control, DECODER, 1 << 20)
        assert isinstance(welcome, Welcome), welcome
        fabric.connect(link, welcome.descriptor)
        return control

    try:
        with linked("other") as other, linked("again") as older, linked("again") as newer:
            farewell = recv_frame(older, DECODER, 1 << 20)
            assert isinstance(farewell, Goodbye)
            assert farewell.reason == "the same decoder opened a new link"
            assert older.recv(1) == b"", "it is closed"
            for control in (other, newer):
                control.setblocking(False)
                with pytest.raises(BlockingIOError):
                    control.recv(1)
    finally:
        fabric.close()
    wait_until(
        lambda: any_prefiller.status()["links_open"] == before, timeout_s=10, what="they are over"
    )
