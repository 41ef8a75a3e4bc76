"""A client of a node's API that can leave."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Call"]


class Call:
    """One completion request on a connection of its own, so that its client can leave."""

    def __init__(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.start_s = time.monotonic()
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
        head = {"content-type": "application/json"} | headers
        self._connection.request("POST", f"{parts.path}/completions", json.dumps(body), head)
        self._response: http.client.HTTPResponse | None = None

    def wait_head(self) -> int:
        """Wait for the answer's head: of a stream, its first token is there. The status."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response.status

    def answer(self) -> tuple[int, Any]:
        """Status and body; of a stream, the list of its chunks."""
        status = self.wait_head()
        assert self._response is not None
        text = self._response.read().decode()
        self._connection.close()
        if not text.startswith("data: "):
            return status, json.loads(text)
        *events, done = [line for line in text.split("\n") if line]
        assert done == "data: [DONE]"
        return status, [json.loads(event.removeprefix("data: ")) for event in events]

    def token_ids(self) -> list[int]:
        """The output of one choice."""
        status, body = self.answer()
        assert status == 200, body
        chunks = body if isinstance(body, list) else [body]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return [token for choice in choices for token in choice["token_ids"]]

    def error(self) -> Any:
        """The error that ends a stream which has begun."""
        assert self._response is not None
        *_, last, end = self._response.read().decode().split("\n\n")
        self._connection.close()
        assert not end
        return json.loads(last.removeprefix("data: "))["error"]

    def leave(self) -> None:
        """Close the connection, whatever there is still to come."""
        if self._response is not None:
            self._response.close()
        self._connection.close()
