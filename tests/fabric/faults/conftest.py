"""Networks that can fail, where this machine lets them be made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fabric.faults.network import Cable, Hosts, Relay, lacks


@pytest.fixture(scope="session")
def network_lack() -> str | None:
    return lacks()


@pytest.fixture
def hosts(network_lack: str | None) -> Iterator[Hosts]:
    if network_lack:
        pytest.skip(network_lack)
    made = Hosts()
    yield made
    made.close()


@pytest.fixture
def cable(hosts: Hosts) -> Cable:
    return Cable(hosts)


@pytest.fixture
def relay(hosts: Hosts) -> Iterator[Relay]:
    lack = lacks(tun=True)
    if lack:
        pytest.skip(lack)
    made = Relay(hosts)
    yield made
    made.close()
