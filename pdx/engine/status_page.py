"""Answers HTTP on a control port: a node's health and metrics, for probes, Prometheus and people.

Runs on the primary's event loop. Read-only, one request a connection. The frame format leaves room
for it: "GET " would be a length above every limit.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import msgspec

from pdx.errors import PeerLost, ProtocolError
from pdx.metrics.node import Health, NodeMetrics
from pdx.metrics.transfers import Sends

__all__ = ["Page", "answer_http", "is_http", "prefiller_pages"]

_MAX_HEAD_BYTES = 16 << 10
_HEAD_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """An answer."""

    body: bytes
    content_type: str = "application/json"
    status: HTTPStatus = HTTPStatus.OK


class Prefiller(Protocol):
    """What the pages tell of."""

    is_draining: bool

    def status(self) -> Mapping[str, int]:
        """Pages by state, queues, links, what went out, and faults."""

    def transfers(self) -> Sends:
        """Prompts on their way out."""


def prefiller_pages(node: Prefiller) -> Mapping[str, Callable[[], Page]]:
    """The pages of a prefiller, by path."""

    @functools.cache
    def metrics() -> NodeMetrics:
        return NodeMetrics(node.status)

    def ready() -> Page:
        if node.is_draining:
            return _text("draining\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return _text("ok\n")

    def health() -> Page:
        counts = dict(node.status())
        body = Health(
            status="unhealthy" if node.is_draining else "ok",
            detail="draining" if node.is_draining else "ready",
            streams=counts["requests_waiting"] + counts["requests_active"],
            counts=counts,
        )
        status = HTTPStatus.SERVICE_UNAVAILABLE if node.is_draining else HTTPStatus.OK
        return Page(body=msgspec.json.encode(body), status=status)

    return {
        "/health": health,
        "/metrics": lambda: Page(body=metrics().scrape(), content_type=NodeMetrics.content_type),
        "/livez": lambda: _text("ok\n"),
        "/readyz": ready,
        "/pdx/transfers": lambda: Page(body=msgspec.json.encode(node.transfers())),
    }


def is_http(head: bytes) -> bool:
    """Whether a connection that begins with these four bytes speaks HTTP."""
    return head in (b"GET ", b"HEAD")


async def answer_http(
    head: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    pages: Mapping[str, Callable[[], Page]],
) -> None:
    """Answer one request, of which ``head`` was read already.

    Raises:
        PeerLost: it does not come whole.
        ProtocolError: it is too long.
    """
    try:
        async with asyncio.timeout(_HEAD_S):
            text = head + await reader.readuntil(b"\r\n\r\n")
    except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
        raise PeerLost(f"an HTTP request broke off: {error!r}") from error
    except asyncio.LimitOverrunError as error:
        raise ProtocolError("an HTTP request's head is too long") from error
    method, _, rest = text.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
    page = pages[path]() if path in pages else _no_page(pages)
    lines = [
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        f"content-type: {page.content_type}",
        f"content-length: {len(page.body)}",
        "connection: close",
    ]
    body = b"" if method.strip() == b"HEAD" else page.body
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)


def _no_page(pages: Mapping[str, Callable[[], Page]]) -> Page:
    text = f"this is a control port; it has {', '.join(pages)}\n"
    return _text(text, HTTPStatus.NOT_FOUND)


def _text(text: str, status: HTTPStatus = HTTPStatus.OK) -> Page:
    return Page(body=text.encode(), content_type="text/plain", status=status)
