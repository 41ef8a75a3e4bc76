"""How two nodes agree on a link before the first request, on both sides. Runs on the primary's
event loop.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from pdx.config.providers import FabricChoice
from pdx.errors import FabricError, NoDataPath, PeerLost, PeerRefused, ProtocolError
from pdx.fabric import Provider
from pdx.messenger.authentication import decoder_code, fresh_nonce, is_equal, prefiller_code
from pdx.messenger.control import Address, ControlConnection, connect
from pdx.messenger.data_path import may_heal
from pdx.messenger.decode_link import DecodeLink
from pdx.messenger.fabric_hub import FabricHub, FabricLink, host_identity
from pdx.messenger.manifest import Manifest, differences
from pdx.messenger.messages import (
    MAX_OPENING_FRAME_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    ControlMessage,
    Describe,
    Description,
    Hello,
    Proof,
    Refuse,
    Welcome,
)
from pdx.messenger.prefill_link import PrefillLink

__all__ = ["NodeIdentity", "describe", "greet", "welcome"]

_STEP_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_Answer = TypeVar("_Answer", Welcome, Description)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """What a node tells its peers about itself."""

    node: str
    manifest: Manifest
    #: Provider that the user asked for.
    fabric: FabricChoice
    #: What it shares with its peers; None: nothing.
    secret: bytes | None = field(default=None, repr=False)


async def describe(
    address: Address, *, timeout_s: float, secret: bytes | None = None
) -> Description:
    """Ask a prefiller which model it serves.

    Args:
        timeout_s: for the connection (5 at most), and again for the answer: a prefiller that still
            loads its model takes connections but does not answer.

    Raises:
        PeerLost: nobody answers.
        ProtocolError: whoever answers is no prefiller of this protocol.
    """
    connection = await connect(address, timeout_s=min(timeout_s, _CONNECT_TIMEOUT_S))
    try:
        answer = await _open(connection, Describe(nonce=fresh_nonce()), secret, timeout_s)
    finally:
        await connection.close()
    if isinstance(answer, Refuse):
        raise PeerRefused(f"{address}: {answer.reason}", peer=str(address))
    if not isinstance(answer, Description):
        raise ProtocolError(f"{address} answered {type(answer).__name__}", peer=str(address))
    return answer


async def greet(
    link: DecodeLink,
    connection: ControlConnection,
    hub: FabricHub,
    identity: NodeIdentity,
    *,
    timeout_s: float,
) -> None:
    """The decoder's handshake: offer data paths, take the prefiller's choice, wait for a write each
    way.

    Raises:
        PeerRefused: for good, with the prefiller's reason.
        NoDataPath: no write gets between the two nodes, and would not the next time.
        PeerLost, ProtocolError, FabricError: the link cannot be made (now).
    """
    offers = _open_offers(link, connection, hub, identity.fabric)
    host = host_identity()
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        node=identity.node,
        manifest=identity.manifest,
        host=host,
        pid=os.getpid(),
        descriptors=[(p, o.fabric.descriptor(o.link)) for p, o in offers.items()],
        nonce=fresh_nonce(),
    )
    try:
        answer = await _open(connection, hello, identity.secret)
        if isinstance(answer, Refuse):
            refusal = PeerRefused if answer.for_good else PeerLost
            raise refusal(answer.reason, peer=link.peer)
        if not isinstance(answer, Welcome) or answer.provider not in offers:
            raise ProtocolError(f"{link.peer} answered {type(answer).__name__}", peer=link.peer)
        chosen = offers.pop(answer.provider)
    finally:
        _withdraw(offers, hub)
    try:
        link.attach(answer, chosen, same_host=answer.host == host)
    except FabricError as error:
        link.give_up(error.message, for_good=not may_heal(error.code))
    await _proved(link, timeout_s)


async def _proved(link: DecodeLink, timeout_s: float) -> None:
    """Wait until a write has gone each way, or the link has ended."""
    waits = [asyncio.create_task(event.wait()) for event in (link.up, link.ended)]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if link.usable:
        return
    link.give_up(f"no write came through in {timeout_s:g} s", for_good=True)
    if not link.lacks_data_path or link.data_path is None:
        reason = f"{link.peer}: data path ({link.provider}): {link.end_reason}"
        raise PeerLost(reason, peer=link.peer)
    message = f"no data path ({link.provider}) to the prefiller at {link.peer}: {link.end_reason}"
    if link.data_path.whose:
        message += f" ({link.data_path.whose})"
    raise NoDataPath(message, hint=link.data_path.hint, peer=link.peer)


async def welcome(
    connection: ControlConnection,
    identity: NodeIdentity,
    description: Description,
    max_prompt_len: int,
    make_link: Callable[[Hello], PrefillLink],
) -> PrefillLink | None:
    """The prefiller's handshake; None when the connection only asked for a description.

    Raises:
        PeerRefused: we have refused the decoder; it knows why.
        PeerLost, ProtocolError: the peer left, or is no pdx node.
    """
    hello = await _receive(connection)
    if not isinstance(hello, Hello | Describe):
        raise ProtocolError(f"{connection.peer} began with {type(hello).__name__}")
    if hello.protocol != PROTOCOL_VERSION:
        reason = f"protocol {hello.protocol} of the decoder is not {PROTOCOL_VERSION}"
        raise _refused(connection, reason)
    try:
        nonce = await _challenge(connection, hello, identity.secret)
    except PeerLost:
        if isinstance(hello, Describe):
            return None  # a decoder that needs no answer any more
        raise
    if isinstance(hello, Describe):
        connection.send(_signed(description, identity.secret, hello, nonce))
        return None
    refusal = _refusal(hello, identity)
    if refusal is not None:
        raise _refused(connection, refusal)
    host = host_identity()
    link = make_link(hello)
    usable = _usable(hello, identity.fabric, same_host=hello.host == host)
    try:
        provider, descriptor = _open_data_path(link, usable)
    except FabricError as error:
        link.end(str(error), None)
        # Descriptors or /dev/shm may have run out: no reason for a decoder to end.
        # An address that never works, such as one of another family than ours.
        for_good = error.code in (errno.EINVAL, errno.EADDRNOTAVAIL)
        reason = f"the data path ({usable[-1][0]}) cannot be opened: {error}"
        if link.addresses:
            reason += f" ({link.addresses})"
        raise _refused(connection, reason, for_good=for_good) from error
    answer = Welcome(
        node=identity.node,
        manifest=identity.manifest,
        host=host,
        pid=os.getpid(),
        provider=provider,
        descriptor=descriptor,
        max_prompt_len=max_prompt_len,
    )
    connection.send(_signed(answer, identity.secret, hello, nonce))
    return link


def _refused(connection: ControlConnection, reason: str, *, for_good: bool = True) -> PeerRefused:
    """Tell the decoder that it is refused; the error that says so here."""
    connection.send(Refuse(reason=reason, for_good=for_good))
    return PeerRefused(reason, peer=connection.peer)


def _open_data_path(
    link: PrefillLink, usable: list[tuple[Provider, bytes]]
) -> tuple[Provider, bytes]:
    """Take the first data path that works here; our descriptor.

    Raises:
        FabricError: none does.
    """
    *others, last = usable
    for provider, peer_descriptor in others:
        try:
            return provider, link.open_data_path(provider, peer_descriptor)
        except FabricError as error:
            link.do_without(provider, error)
    return last[0], link.open_data_path(*last)


async def _open(
    connection: ControlConnection,
    opening: Hello | Describe,
    secret: bytes | None,
    timeout_s: float = _STEP_TIMEOUT_S,
) -> ControlMessage:
    """Send the first message; the answer to it, from a peer that has our secret, if we have one.

    Raises:
        PeerRefused: only one of us has a secret, or they differ.
    """
    connection.send(opening)
    answer = await _receive(connection, timeout_s)
    nonce = None
    if isinstance(answer, Challenge):
        if secret is None:
            connection.send(Refuse(reason="the decoder has no secret"))
            raise PeerRefused(
                f"{connection.peer} asks for a secret",
                hint="give this node the prefiller's: --secret-file or PDX_SECRET",
                peer=connection.peer,
            )
        nonce = answer.nonce
        connection.send(Proof(mac=decoder_code(secret, opening, nonce)))
        answer = await _receive(connection, timeout_s)
    if secret is None or not isinstance(answer, Welcome | Description):
        return answer
    if nonce is None:
        raise PeerRefused(
            f"{connection.peer} has no secret, this node has one", peer=connection.peer
        )
    if not is_equal(answer.mac, prefiller_code(secret, opening, nonce, answer)):
        raise PeerRefused(f"{connection.peer} has another secret", peer=connection.peer)
    return answer


async def _challenge(
    connection: ControlConnection, opening: Hello | Describe, secret: bytes | None
) -> bytes:
    """Let the decoder prove that it has our secret, if we have one; the nonce.

    Raises:
        ProtocolError: it has not; it has been told.
    """
    nonce = fresh_nonce()
    if secret is None:
        return nonce
    connection.send(Challenge(nonce=nonce))
    proof = await _receive(connection)
    expected = decoder_code(secret, opening, nonce)
    if not isinstance(proof, Proof) or not is_equal(proof.mac, expected):
        connection.send(Refuse(reason="the prefiller has another secret"))
        raise ProtocolError(f"{connection.peer} does not have our secret")
    return nonce


def _signed(
    answer: _Answer, secret: bytes | None, opening: Hello | Describe, nonce: bytes
) -> _Answer:
    if secret is None:
        return answer
    mac = prefiller_code(secret, opening, nonce, answer)
    return msgspec.structs.replace(answer, mac=mac)


async def _receive(
    connection: ControlConnection, timeout_s: float = _STEP_TIMEOUT_S
) -> ControlMessage:
    try:
        async with asyncio.timeout(timeout_s):
            return await connection.receive(MAX_OPENING_FRAME_BYTES)
    except TimeoutError as error:
        raise PeerLost(
            f"{connection.peer}: no answer in {timeout_s:g} s", peer=connection.peer
        ) from error


def _open_offers(
    link: DecodeLink, connection: ControlConnection, hub: FabricHub, choice: FabricChoice
) -> dict[str, FabricLink]:
    """Our ends of the data paths that may be used and work here.

    Raises:
        FabricError: none does.
    """
    offers: dict[str, FabricLink] = {}
    *others, last = _offered(choice, connection)
    for provider in others:
        try:
            offers[provider] = hub.open_link(provider, connection.local_host, link.on_event)
        except FabricError as error:
            hub.do_without(provider, error)
    try:
        offers[last] = hub.open_link(last, connection.local_host, link.on_event)
    except FabricError:
        if not offers:
            raise
    return offers


def _withdraw(offers: dict[str, FabricLink], hub: FabricHub) -> None:
    """Offers that were not taken: their endpoints are closed and their events dropped."""
    for offer in offers.values():
        hub.discard(offer)


def _offered(choice: FabricChoice, connection: ControlConnection) -> list[Provider]:
    """Shared memory first, where the peer may be on this host."""
    if choice != FabricChoice.AUTO:
        return [Provider(choice)]
    loopback = ipaddress.ip_address(connection.peer_host).is_loopback
    return [Provider.SHM, Provider.TCP] if loopback else [Provider.TCP]


def _refusal(hello: Hello, identity: NodeIdentity) -> str | None:
    table = differences(identity.manifest, hello.manifest, us="prefiller", them="decoder")
    if table is not None:
        return f"the two nodes do not match:\n{table}"
    same_host = hello.host == host_identity()
    if not _usable(hello, identity.fabric, same_host=same_host):
        offered = [provider for provider, _ in hello.descriptors]
        where = "" if same_host else "; shared memory does not reach, the hosts differ"
        return f"no common data path: offered {offered}, allowed {identity.fabric}{where}"
    return None


def _usable(hello: Hello, choice: FabricChoice, *, same_host: bool) -> list[tuple[Provider, bytes]]:
    """Data paths that both sides allow and that reach, in the decoder's order."""
    reached = [Provider.TCP, Provider.SHM] if same_host else [Provider.TCP]
    allowed = [each for each in reached if choice in (FabricChoice.AUTO, each)]
    return [
        (Provider(provider), descriptor)
        for provider, descriptor in hello.descriptors
        if provider in allowed
    ]
