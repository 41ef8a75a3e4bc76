"""Addresses as people write them, and as nodes print them."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from pdx.errors import ConfigError, FabricError
from pdx.host.addresses import HostAddress
from pdx.host.route import Route
from pdx.messenger.control import Address, parse_address, reachable


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7001", "127.0.0.1", 7001),
        ("[::1]:7001", "::1", 7001),
        ("localhost:0", "localhost", 0),
        (":7001", "127.0.0.1", 7001),
        ("7001", "127.0.0.1", 7001),
    ],
)
def test_addresses_are_read_in_every_usual_form(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host=host, port=port)


@pytest.mark.parametrize("text", ["", "host", "::1:7001", "host:port", "host:70000", "host:-1"])
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        parse_address(text)


def test_printed_address_can_be_read_back() -> None:
    for address in (Address(host="::1", port=7001), Address(host="10.0.0.1", port=1)):
        assert parse_address(str(address)) == address


def address_of(interface: str, text: str) -> HostAddress:
    return HostAddress(interface=interface, address=ip_address(text))


def test_a_wildcard_is_announced_by_addresses_that_other_hosts_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one of the default route first: a bridge of containers comes before it in the list."""
    own = [
        address_of("lo", "127.0.0.1"),
        address_of("docker0", "172.17.0.1"),
        address_of("eth0", "10.0.0.5"),
        address_of("eth1", "169.254.3.4"),
        address_of("lo", "::1"),
        address_of("eth0", "fe80::1"),
        address_of("eth0", "2001:db8::5"),
    ]

    def route_to(host: str) -> Route:
        if ":" in host:
            raise FabricError("there is no route")
        return Route(peer_address=host, local_address="10.0.0.5", interface="eth0")

    monkeypatch.setattr("pdx.messenger.control.host_addresses", lambda: own)
    monkeypatch.setattr("pdx.messenger.control.route_to", route_to)
    found = [str(each) for each in reachable(Address(host="0.0.0.0", port=7))]
    assert found == ["10.0.0.5:7", "172.17.0.1:7"]
    assert [str(each) for each in reachable(Address(host="::", port=7))] == ["[2001:db8::5]:7"]
    del own[1:3], own[-1]
    assert [str(each) for each in reachable(Address(host="0.0.0.0", port=7))] == ["127.0.0.1:7"]
    assert [str(each) for each in reachable(Address(host="::", port=7))] == ["[::1]:7"]
    for host in ("127.0.0.1", "10.1.2.3", "::1"):
        assert reachable(Address(host=host, port=7)) == [Address(host=host, port=7)]
