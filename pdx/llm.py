"""The Python API: a model in this process's own node, colocated or with prefillers elsewhere.

    from pdx import LLM, SamplingParams

    with LLM("path/to/model") as llm:
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(output.text)

The node runs on an event loop in a thread of its own. No torch here: ranks are processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from pdx.checkpoint.model_source import resolve_model
from pdx.config.engine import EngineConfig
from pdx.config.providers import FabricChoice
from pdx.engine.colocated_node import ColocatedNode
from pdx.engine.decode_node import DecodeNode
from pdx.engine.loading import load_model
from pdx.engine.local_frontend import LocalFrontend
from pdx.engine.peer import describe_with_patience
from pdx.messenger.control import Address, parse_address
from pdx.request.request import FinishReason, SamplingParams
from pdx.text.tokenizer import Tokenizer

__all__ = ["LLM", "Generation", "SamplingParams"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a model made of one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    #: The text of ``token_ids``, special tokens left out.
    text: str
    finish_reason: FinishReason
    #: The node that prefilled the prompt; None: this one.
    prefiller: str | None


class LLM:
    """A loaded model. Close it, or use it in a ``with`` block: it owns processes.

    Args:
        model: a Hugging Face folder, or ``org/name[@revision]``.
        prefillers: addresses (HOST:PORT) of prefill nodes that serve the same model; none: prompts
            are prefilled here.
        secret: what the prefillers share with their decoders; None: nothing, on loopback.
        patience_s: how long to wait for a prefiller, seconds.
        settings: fields of :class:`pdx.config.engine.EngineConfig`, for instance ``tp_size=2``.

    Raises:
        PdxError: the model cannot be served so, or no prefiller takes us.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        prefillers: Sequence[str] = (),
        secret: bytes | None = None,
        patience_s: float = 60.0,
        **settings: Any,
    ) -> None:
        self._folder = resolve_model(str(model))
        self._tokenizer = Tokenizer.from_folder(self._folder)
        self._closing = contextlib.AsyncExitStack()
        self._runner, self._closed = asyncio.Runner(), asyncio.Event()
        self._loop = self._runner.get_loop()
        work = self._closed.wait()
        self._thread = threading.Thread(target=self._runner.run, args=[work], daemon=True)
        self._thread.start()
        try:
            peers = [parse_address(each) for each in prefillers]
            self._run(self._start(peers, secret, patience_s, EngineConfig(**settings)))
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        ignore_eos: bool = False,
    ) -> list[Generation]:
        """One generation for each prompt, in their order; they run together.

        Args:
            prompts: texts, or lists of token ids.
            sampling: by default 128 tokens at temperature 1. Each prompt has its seed.
            ignore_eos: go on after a token that ends sequences. Such tokens end them otherwise,
                besides ``sampling.stop_token_ids``.

        Raises:
            InvalidRequest: a prompt is empty or too long.
            PdxError: a request or the node failed.
        """
        sampling = sampling or SamplingParams(max_tokens=128)
        if not ignore_eos:
            stops = {*sampling.stop_token_ids, *self._loaded.model.eos_token_ids}
            sampling = msgspec.structs.replace(sampling, stop_token_ids=tuple(stops))
        many = [prompts] if isinstance(prompts, str) else prompts
        ids = [self._tokenizer.encode(p) if isinstance(p, str) else list(p) for p in many]
        return self._run(self._generate_all(ids, sampling))

    def close(self) -> None:
        """End the node and its processes."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._closing.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join()
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # a Ctrl-C among them
            future.cancel()
            raise

    async def _start(
        self, peers: list[Address], secret: bytes | None, patience_s: float, config: EngineConfig
    ) -> None:
        if peers:
            described = await describe_with_patience(
                peers, timeout_s=patience_s, on_wait=logger.info, secret=secret
            )
            dtype = described.dtype if config.dtype == "auto" else config.dtype
            config = dataclasses.replace(config, dtype=dtype)
        self._loaded = await load_model(self._folder, config, lambda progress: None)
        self._closing.push_async_callback(self._loaded.close)
        self._frontend = LocalFrontend()
        node = await self._decoder(peers, secret, patience_s) if peers else self._colocated()
        await self._closing.enter_async_context(self._frontend.serving(node))

    def _colocated(self) -> ColocatedNode:
        node = ColocatedNode(self._loaded, model_name=self._folder.name, frontend=self._frontend)
        self._closing.push_async_callback(node.stop)
        return node

    async def _decoder(
        self, peers: list[Address], secret: bytes | None, patience_s: float
    ) -> DecodeNode:
        node = DecodeNode(
            self._loaded,
            model_name=self._folder.name,
            peers=peers,
            fabric=FabricChoice.AUTO,
            secret=secret,
            frontend=self._frontend,
        )
        self._closing.push_async_callback(node.stop, "the client shuts down")
        await node.prefillers.connect_any(patience_s, logger.info)
        return node

    async def _generate_all(
        self, prompts: Sequence[list[int]], sampling: SamplingParams
    ) -> list[Generation]:
        tasks = [asyncio.create_task(self._generate(ids, sampling)) for ids in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:  # where one has failed, the others are not wanted
            for task in tasks:
                task.cancel()

    async def _generate(self, prompt_ids: list[int], sampling: SamplingParams) -> Generation:
        token_ids: list[int] = []
        async for update in self._frontend.generate(prompt_ids, sampling):
            token_ids += update.token_ids
        assert update.finish_reason is not None and update.timeline is not None
        return Generation(
            prompt_token_ids=prompt_ids,
            token_ids=token_ids,
            text=self._tokenizer.decode(token_ids),
            finish_reason=update.finish_reason,
            prefiller=update.timeline.prefiller,
        )
