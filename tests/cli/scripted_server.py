"""An OpenAI-shaped server that answers as a test says, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["ScriptedServer", "scripted_server"]

_MODELS = {"object": "list", "data": [{"id": "scripted", "object": "model"}]}


class ScriptedServer:
    """Answers each chat with the next script: pieces of text, or a status and a body. The piece
    ``HOLD`` waits until the client has left.
    """

    HOLD = "<hold>"

    def __init__(self) -> None:
        self.scripts: list[list[str] | tuple[int, dict[str, Any]]] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""
        #: Answers to GET; of other paths there are none.
        self.pages = {"/v1/models": json.dumps(_MODELS).encode()}
        #: A client has left in the middle of an answer.
        self.left = threading.Event()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """One POST."""
        length = int(handler.headers["content-length"])
        self.bodies.append(json.loads(handler.rfile.read(length)))
        self.keys.append(handler.headers["authorization"])
        script = self.scripts.pop(0)
        if isinstance(script, tuple):
            status, body = script
            send(handler, status, "application/json", json.dumps(body).encode())
            return
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("connection", "close")
        handler.end_headers()
        for piece in script:
            if piece == self.HOLD:
                handler.connection.settimeout(20)
                assert handler.connection.recv(1) == b""
                self.left.set()
                return
            chunk = {"choices": [{"index": 0, "delta": {"content": piece}}]}
            handler.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            handler.wfile.flush()
        handler.wfile.write(b"data: [DONE]\n\n")


def send(handler: BaseHTTPRequestHandler, status: int, kind: str, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("content-type", kind)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """On a free port, with one model named `scripted`."""
    server = ScriptedServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = server.pages.get(self.path)
            send(self, 404 if page is None else 200, "application/json", page or b"{}")

        def do_POST(self) -> None:
            server.answer(self)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
