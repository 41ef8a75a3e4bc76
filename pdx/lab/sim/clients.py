"""The clients of a simulated cluster, and the frontend that stands between them and a decoder.

A client sends one request, compares each token with what the model would say, and ends once: with a
finish reason, with an error, by leaving, or because its decoder died.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from pdx.lab.sim.model import SimulatedModel
from pdx.request.ids import IdArray
from pdx.request.request import SamplingParams
from pdx.request.stream import (
    Abort,
    FrontendConfig,
    FrontendReady,
    NodeStatus,
    StepFrame,
    StreamFailed,
    StreamUpdate,
    Submit,
    TransfersAsked,
    TransfersTold,
)

__all__ = ["Client", "End", "RequestPlan", "SimulatedFrontend"]


class End(enum.StrEnum):
    """How a request ended for its client."""

    #: All tokens came.
    FINISHED = "finished"
    #: The node answered with an error.
    FAILED = "failed"
    #: The client left.
    ABORTED = "aborted"
    #: The decoder was gone: the connection broke, or none could be made.
    CUT_OFF = "cut off"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """One request of a scenario."""

    number: int
    at_ns: int
    decoder: str
    token_ids: tuple[int, ...]
    max_tokens: int
    #: Share of the vocabulary that ends the output, as stop tokens.
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    prompt_logprobs: int | None = None


@dataclass(slots=True, eq=False)
class Client:
    """One request under way.

    Args:
        note: writes history.
        broken: told of what must not happen.
        on_end: told of the end.
    """

    plan: RequestPlan
    model: SimulatedModel
    note: Callable[[str, str], None]
    broken: Callable[[str, str], None]
    on_end: Callable[[], None]
    end: End | None = None
    #: Status and kind of the error.
    error: str = ""
    output: list[int] = field(default_factory=list)
    submitted_ns: int | None = None
    ended_ns: int | None = None
    first_token_ns: int | None = None
    _state: int = 0

    @property
    def name(self) -> str:
        return f"r{self.plan.number}"

    def submit(self, frontend: SimulatedFrontend | None, now_ns: int) -> None:
        """Send the request; None: nobody takes it."""
        plan = self.plan
        self.submitted_ns = now_ns
        self.note(self.name, f"asks {plan.decoder}: {len(plan.token_ids)} + {plan.max_tokens}")
        if frontend is None:
            self.finish(End.CUT_OFF, now_ns, "nobody listens")
            return
        self._state = self.model.state_after(plan.token_ids)
        frontend.take(
            self,
            Submit(
                stream_id=plan.number,
                token_ids=IdArray(plan.token_ids),
                sampling=SamplingParams(
                    max_tokens=plan.max_tokens,
                    temperature=0.0,
                    stop_token_ids=plan.stop_token_ids,
                    prompt_logprobs=plan.prompt_logprobs,
                ),
                cache_salt=plan.cache_salt,
            ),
        )

    def on_update(self, update: StreamUpdate, now_ns: int) -> None:
        """Tokens came."""
        if self.end is not None:
            if self.end is not End.ABORTED:
                self.broken("one-end", f"{self.name} got {update} after its end ({self.end})")
            return
        if update.token_ids and not self.output:
            self.first_token_ns = now_ns
            self._check_scores(update)
        for token_id in update.token_ids:
            expected = self.model.token(self._state)
            if token_id != expected:
                place = len(self.output)
                self.broken(
                    "right-tokens", f"{self.name}: output token {place} is not what the model says"
                )
            position = len(self.plan.token_ids) + len(self.output)
            _, self._state = self.model.advance(self._state, position, token_id)
            self.output.append(token_id)
        if update.finish_reason is not None:
            self._check_length()
            self.finish(End.FINISHED, now_ns, f"{len(self.output)} tokens")

    def on_failed(self, failed: StreamFailed, now_ns: int) -> None:
        """An error came."""
        if self.end is not None:
            if self.end is not End.ABORTED:
                self.broken("one-end", f"{self.name} failed after its end ({self.end})")
            return
        self.error = f"{failed.http_status} {failed.kind}"
        self.finish(End.FAILED, now_ns, f"{self.error}: {failed.message}")

    def finish(self, end: End, now_ns: int, detail: str) -> None:
        """The one end."""
        assert self.end is None
        self.end = end
        self.ended_ns = now_ns
        self.note(self.name, f"{end}: {detail}")
        self.on_end()

    def _check_length(self) -> None:
        stopped = self.output[-1] in self.plan.stop_token_ids
        if len(self.output) != self.plan.max_tokens and not stopped:
            self.broken("right-tokens", f"{self.name} ended after {len(self.output)} tokens")

    def _check_scores(self, update: StreamUpdate) -> None:
        if self.plan.prompt_logprobs is None:
            return
        state, prompt = 0, self.plan.token_ids
        expected = []
        for position, token_id in enumerate(prompt[:-1]):
            _, state = self.model.advance(state, position, token_id)
            expected.append(self.model.logprob(state, prompt[position + 1]))
        if [score.logprob for score in update.prompt_logprobs] != expected:
            self.broken("right-tokens", f"{self.name}: the prompt's scores are not the model's")


class SimulatedFrontend:
    """A decoder's frontend: streams go in, frames go out to clients, at once.

    Args:
        now_ns: virtual time.
        on_status: told of the node's status.
    """

    def __init__(self, now_ns: Callable[[], int], on_status: Callable[[NodeStatus], None]) -> None:
        self._now_ns = now_ns
        self._on_status = on_status
        self._queue: asyncio.Queue[Submit | Abort | TransfersAsked] = asyncio.Queue()
        self._clients: dict[int, Client] = {}
        self.open = False

    async def start(self, config: FrontendConfig) -> FrontendReady:
        self.open = True
        return FrontendReady(host=config.host, port=config.port)

    async def receive(self) -> Submit | Abort | TransfersAsked:
        return await self._queue.get()

    async def stop(self) -> None:
        self.close()

    def close(self) -> None:
        """The node is gone: whoever waits is left with a broken connection."""
        self.open = False
        for client in list(self._clients.values()):
            if client.end is None:
                client.finish(End.CUT_OFF, self._now_ns(), "the decoder is gone")
        self._clients.clear()

    def take(self, client: Client, submit: Submit) -> None:
        """A client's request."""
        self._clients[submit.stream_id] = client
        self._queue.put_nowait(submit)

    def abort(self, client: Client) -> None:
        """A client leaves."""
        if client.end is None:
            client.finish(End.ABORTED, self._now_ns(), "the client leaves")
            self._queue.put_nowait(Abort(stream_id=client.plan.number))

    def send(self, message: StepFrame | StreamFailed | NodeStatus | TransfersTold) -> None:
        match message:
            case StepFrame(updates=updates):
                for update in updates:
                    self._on_update(update)
            case StreamFailed(stream_id=stream_id):
                client = self._clients.pop(stream_id, None)
                if client is not None:
                    client.on_failed(message, self._now_ns())
            case NodeStatus():
                self._on_status(message)
            case TransfersTold():
                pass

    def _on_update(self, update: StreamUpdate) -> None:
        client = self._clients.get(update.stream_id)
        if client is None:
            return
        client.on_update(update, self._now_ns())
        # Whatever comes after an end is told to the client, too: it must not come.
        if client.end is End.CUT_OFF:
            del self._clients[update.stream_id]
