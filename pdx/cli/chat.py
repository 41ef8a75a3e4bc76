"""`pdx chat`: a small chat against any OpenAI-compatible server, in a terminal or a pipe."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pdx.cli.options import with_settings
from pdx.config.resolve import Settings
from pdx.errors import ConfigError
from pdx.lab.api import ApiError, api_base, error_of, events, headers, pick_model

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

__all__ = ["chat"]

_COMMANDS = "/reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"
_READ_TIMEOUT_S = 600.0


class _Piece(NamedTuple):
    """Some text of an answer, or of what a model thinks before it answers."""

    text: str
    is_thought: bool


@dataclass(slots=True)
class _Chat:
    """One conversation."""

    client: httpx.Client
    base: str
    model: str
    system: str | None
    #: max_tokens and the like; sent as they are.
    options: dict[str, Any]
    turns: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> Generator[_Piece, None, None]:
        """Ask; yields the answer as it comes. What has come is remembered, also when the caller
        stops early; a question without an answer is forgotten.

        Raises:
            ApiError: the server refused or failed.
        """
        self.turns.append({"role": "user", "content": question})
        answer = ""
        try:
            for piece in self._stream():
                answer += "" if piece.is_thought else piece.text
                yield piece
        finally:
            if answer:
                self.turns.append({"role": "assistant", "content": answer})
            else:
                self.turns.pop()

    def _stream(self) -> Iterator[_Piece]:
        import httpx

        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": system + self.turns, "stream": True}
        try:
            with self.client.stream(
                "POST", f"{self.base}/chat/completions", json=body | self.options
            ) as answer:
                if answer.status_code != 200:
                    raise error_of(answer.status_code, answer.read())
                for event in events(answer):
                    for choice in event.get("choices") or []:
                        delta = choice.get("delta") or {}
                        yield _Piece(delta.get("reasoning_content") or "", True)
                        yield _Piece(delta.get("content") or "", False)
        except httpx.HTTPError as error:
            raise ApiError(f"no answer from {self.base}: {error}", kind="connection") from error


@with_settings()
def chat(
    settings: Settings,
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The API, such as http://127.0.0.1:8000/v1.")
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="NAME", help="The server's first model by default."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is told first.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Longest answer.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, metavar="NUMBER", help="0 is greedy.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="PDX_API_KEY", metavar="KEY", help="Sent as a bearer token."),
    ] = None,
) -> None:
    """Chat with a model. Reads one question from a pipe, or many from a terminal.

    In the terminal: /reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer.
    """
    import httpx

    base = api_base(url)
    options = {"max_tokens": max_tokens, "temperature": temperature}
    timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=10.0)
    with httpx.Client(timeout=timeout, headers=headers(api_key)) as client:
        talk = _Chat(
            client=client,
            base=base,
            model=model or pick_model(client, base),
            system=system,
            options={name: value for name, value in options.items() if value is not None},
        )
        if sys.stdin.isatty():
            _talk_on_terminal(talk)
        else:
            _answer_pipe(talk)


def _answer_pipe(talk: _Chat) -> None:
    question = sys.stdin.read().strip()
    if not question:
        raise ConfigError("there is no question on stdin")
    for piece in talk.ask(question):
        if not piece.is_thought:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    sys.stdout.write("\n")


def _talk_on_terminal(talk: _Chat) -> None:
    from rich.console import Console

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a line editor and a history

    console = Console()
    console.print(f"[bold]{talk.model}[/] at {talk.base}; {_COMMANDS}", highlight=False)
    while True:
        try:
            question = input("\n> ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n(Ctrl-D ends)", style="dim")
            continue
        if question in ("/exit", "/quit"):
            return
        if question == "/reset":
            talk.turns.clear()
            console.print("(a new conversation)", style="dim")
        elif question.startswith("/"):
            console.print(f"({_COMMANDS})", style="dim")
        elif question:
            _show_answer(talk, question, console)


def _show_answer(talk: _Chat, question: str, console: Console) -> None:
    """Stream the answer: its last lines while it comes, then all of it, as Markdown."""
    from rich.live import Live
    from rich.markdown import Markdown

    thought, text, note = "", "", ""
    began_s, first_s = time.monotonic(), None
    try:
        with (
            contextlib.closing(talk.ask(question)) as pieces,
            Live(console=console, transient=True, refresh_per_second=12) as live,
        ):
            for piece in pieces:
                if piece.text:
                    first_s = first_s or time.monotonic()
                if piece.is_thought:
                    thought += piece.text
                else:
                    text += piece.text
                live.update(_last_lines(text or thought, console, "" if text else "dim"))
    except KeyboardInterrupt:
        note = "stopped; "
    except ApiError as error:
        console.print(f"error: {error.message}", style="red", highlight=False, markup=False)
    if text:
        console.print(Markdown(text))
        now_s = time.monotonic()
        console.print(
            f"({note}first text after {(first_s or now_s) - began_s:.2f} s, "
            f"all in {now_s - began_s:.2f} s)",
            style="dim",
            highlight=False,
        )


def _last_lines(text: str, console: Console, style: str) -> Any:
    """The last lines of the text that the terminal holds: what is longer cannot be redrawn."""
    from rich.text import Text

    lines = Text(text, style=style).wrap(console, console.width)
    return Text("\n").join(lines[-max(console.height - 2, 1) :])
