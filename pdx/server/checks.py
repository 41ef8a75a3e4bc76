"""From a request body to token ids and resolved sampling parameters, or a refusal. Runs in the
frontend, before anyone is asked for work.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdx.errors import CheckpointError, InvalidRequest, UnknownModel
from pdx.request.request import SamplingParams
from pdx.request.stream import FrontendConfig
from pdx.server.bodies import ChatBody, CompletionBody, GenerateBody
from pdx.text.chat_template import ChatTemplate
from pdx.text.tokenizer import Tokenizer

__all__ = ["Prompt", "RequestChecker", "SamplingDefaults"]

_COMPLETION_MAX_TOKENS = 16
_MAX_TEMPERATURE = 2.0
#: Longer texts are tokenised in a thread: on the event loop they would hold up all streams.
_INLINE_CHARS = 4096
#: Texts longer than this times the context are first judged by their beginning.
_HEAD_CHARS_PER_TOKEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What the checkpoint recommends where the client says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0

    @classmethod
    def from_folder(cls, folder: str | Path) -> SamplingDefaults:
        """Read ``generation_config.json``, where there is one and it samples (``do_sample``).

        Raises:
            CheckpointError: the file is damaged.
        """
        path = Path(folder) / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            config = json.loads(path.read_text("utf-8"))
            if not config.get("do_sample"):
                return cls()
            values = {name: config.get(name) for name in ("temperature", "top_p")}
            return cls(**{name: float(value) for name, value in values.items() if value})
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One stream to be submitted."""

    token_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestChecker:
    """All checks for one served model. The methods raise InvalidRequest or UnknownModel."""

    config: FrontendConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingDefaults
    #: Threads for tokenising long texts.
    pool: Executor

    async def completion(self, body: CompletionBody) -> list[Prompt]:
        """One prompt per choice."""
        self._check_fields(body)
        texts, id_lists = _split_prompt(body.prompt)
        if len(texts) + len(id_lists) > self.config.max_streams:
            raise InvalidRequest(
                f"{len(texts) + len(id_lists)} prompts are more than the {self.config.max_streams} "
                "streams that this server runs at once",
                param="prompt",
            )
        if texts:
            id_lists = await self._encode(texts, "prompt", add_special_tokens=True)
        prompts = [self._prompt(ids, body, _COMPLETION_MAX_TOKENS, "prompt") for ids in id_lists]
        for prompt in prompts:
            self._check_ids(prompt.token_ids)
        return prompts

    async def chat(self, body: ChatBody) -> list[Prompt]:
        """The one prompt that the chat template makes of the messages."""
        self._check_fields(body)
        if self.template is None:
            raise InvalidRequest(f"the model {self.config.model_name} has no chat template")
        _check_messages(body.messages)
        text = self.template.render(body.messages)
        [token_ids] = await self._encode([text], "messages", add_special_tokens=False)
        return [self._prompt(token_ids, body, None, "messages")]

    def check_model(self, name: str | None) -> None:
        """Only one model is served; a request may leave it out."""
        if name is not None and name != self.config.model_name:
            raise UnknownModel(
                f"the model {name!r} is not served here, {self.config.model_name!r} is",
                param="model",
            )

    async def _encode(
        self, texts: Sequence[str], param: str, *, add_special_tokens: bool
    ) -> list[list[int]]:
        if sum(map(len, texts)) <= _INLINE_CHARS:
            return self.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        in_thread = asyncio.get_running_loop().run_in_executor

        def encode(some: Sequence[str]) -> list[list[int]]:
            return self.tokenizer.encode_batch(some, add_special_tokens=add_special_tokens)

        head_chars = _HEAD_CHARS_PER_TOKEN * self.config.context_len
        heads = [text[:head_chars] for text in texts if len(text) > head_chars]
        for token_ids in await in_thread(self.pool, encode, heads):
            self._check_head(head_chars, len(token_ids), param)
        return await in_thread(self.pool, encode, texts)

    def _check_head(self, num_chars: int, num_tokens: int, param: str) -> None:
        """Refuse a huge text by its beginning, at a cost that does not grow with it.

        Twice the context leaves room for a tokenizer that cuts the beginning differently when more
        text follows.
        """
        if num_tokens > 2 * self.config.context_len:
            raise InvalidRequest(
                f"the first {num_chars} characters of the prompt are {num_tokens} tokens already; "
                f"the model's context is {self.config.context_len} tokens",
                param=param,
            )

    def _check_fields(self, body: GenerateBody) -> None:
        self.check_model(body.model)
        if body.temperature is not None and not 0 <= body.temperature <= _MAX_TEMPERATURE:
            raise InvalidRequest(
                f"temperature must be between 0 and {_MAX_TEMPERATURE:g}, got {body.temperature:g}",
                param="temperature",
            )
        if body.top_p is not None and not 0 < body.top_p <= 1:
            raise InvalidRequest(
                f"top_p must be above 0 and at most 1, got {body.top_p:g}", param="top_p"
            )
        for name, value in (
            ("max_tokens", body.max_tokens),
            ("max_completion_tokens", body.max_completion_tokens),
        ):
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {value}", param=name)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        wrong = next((i for i in token_ids if not 0 <= i < self.config.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"token id {wrong} is outside the vocabulary of {self.config.vocab_size}",
                param="prompt",
            )

    def _prompt(
        self, token_ids: list[int], body: GenerateBody, default_max: int | None, param: str
    ) -> Prompt:
        prompt_len, context_len = len(token_ids), self.config.context_len
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param=param)
        wanted = body.max_completion_tokens or body.max_tokens
        # A default never refuses what would fit with less.
        room = max(1, context_len - prompt_len)
        max_tokens = wanted or min(default_max or room, room)
        if prompt_len + max_tokens > context_len:
            raise InvalidRequest(
                f"the prompt has {prompt_len} tokens and {max_tokens} more may be generated, "
                f"{prompt_len + max_tokens} together; the model's context is {context_len} tokens",
                param=param if prompt_len >= context_len else "max_tokens",
            )
        return Prompt(token_ids=token_ids, sampling=self._sampling(body, max_tokens))

    def _sampling(self, body: GenerateBody, max_tokens: int) -> SamplingParams:
        temperature, top_p, seed = body.temperature, body.top_p, body.seed
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.defaults.temperature if temperature is None else temperature,
            top_p=self.defaults.top_p if top_p is None else top_p,
            seed=secrets.randbits(64) if seed is None else seed % 2**64,
            stop_token_ids=() if body.ignore_eos else self.config.eos_token_ids,
        )


def _split_prompt(prompt: Any) -> tuple[list[str], list[list[int]]]:
    """Texts, or lists of ids: one of the two is empty."""
    if prompt is None:
        raise InvalidRequest("prompt is missing", param="prompt")
    is_ids = isinstance(prompt, list) and set(map(type, prompt)) == {int}
    if is_ids or isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list):
        raise _bad_prompt()
    if not prompt or "" in prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return prompt, []
    if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in prompt):
        return [], prompt
    raise _bad_prompt()


def _bad_prompt() -> InvalidRequest:
    return InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists",
        param="prompt",
    )


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """The form of each message. Which roles may follow which is the template's business."""
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    for idx, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{idx}].role must be a string", param="messages")
        content = message.get("content")
        only_calls = content is None and bool(message.get("tool_calls"))
        if not (isinstance(content, str | list) or only_calls):
            raise InvalidRequest(
                f"messages[{idx}].content must be a string or a list of parts", param="messages"
            )
