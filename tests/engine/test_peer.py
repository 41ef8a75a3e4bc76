"""A decoder's connector against a prefiller's side of the handshake, over real sockets and a
simulated data path.
"""

from __future__ import annotations

import errno

import pytest

from pdx.config.providers import FabricChoice
from pdx.engine.peer import PeerConnector
from pdx.errors import NoDataPath
from pdx.fabric import LinkDown
from pdx.messenger.control import ControlConnection
from pdx.messenger.decode_link import DecodeLink
from pdx.messenger.fabric_hub import FabricLink
from pdx.messenger.handshake import welcome
from pdx.messenger.messages import Hello, Welcome
from pdx.messenger.prefill_link import PrefillLink
from pdx.messenger.slots import SlotTable
from tests.messenger.manifests import ONE_RANK
from tests.messenger.two_nodes import (
    DESCRIPTION,
    DecodeEngine,
    PrefillEngine,
    hub,
    identity,
    network,
    serving,
)


async def connected(fabric: FabricChoice) -> str:
    """The provider of a decoder's link, where the peer's shm endpoint cannot be reached."""
    room = network()
    with hub(room, "d") as decode_hub, hub(room, "p") as prefill_hub:

        async def serve(connection: ControlConnection) -> None:
            def make_link(hello: Hello) -> PrefillLink:
                return PrefillLink(
                    connection=connection,
                    hello=hello,
                    hub=prefill_hub,
                    layout=ONE_RANK.layout(),
                    owner=PrefillEngine(),
                )

            link = await welcome(connection, identity("p", "auto"), DESCRIPTION, 64, make_link)
            if link is not None:
                await link.run()

        async with serving(serve) as address:
            connector = PeerConnector(
                address, decode_hub, SlotTable(), identity("d", fabric), owner=DecodeEngine()
            )
            await connector.connect_once()
            assert connector.link is not None
            provider = connector.link.provider
            connector.link.end("the test ends", None)
            await connector.link.over.wait()
    return provider


async def test_auto_goes_over_the_network_where_shared_memory_carries_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As between two users: the endpoint of the other one may not be opened."""
    attach, refused = DecodeLink.attach, []

    def refuse_shm(self: DecodeLink, answer: Welcome, link: FabricLink, *, same_host: bool) -> None:
        attach(self, answer, link, same_host=same_host)
        if link.provider == "shm":
            refused.append(link)
            self.on_event(LinkDown(link=link.link, code=errno.EACCES, reason="no access"))

    monkeypatch.setattr(DecodeLink, "attach", refuse_shm)
    assert await connected("auto") == "tcp"
    [said] = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert said.startswith("tcp is used instead of shm: no data path (shm) to the prefiller")
    assert said.endswith("no access")
    with pytest.raises(NoDataPath, match="no access"):
        await connected("shm")
    assert len(refused) == 2
