"""From a request body to token ids and resolved sampling parameters, or a refusal. Runs in the
frontend, before anyone is asked for work. What takes long runs in a thread.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from pdx.errors import InvalidRequest, UnknownModel
from pdx.request.request import SamplingParams
from pdx.request.stream import FrontendConfig
from pdx.server.bodies import (
    MAX_TEXT_CHARS,
    MAX_TOKENIZED_LEN,
    BodyT,
    ChatBody,
    CompletionBody,
    GenerateBody,
    TokenizeBody,
    parse_body,
)
from pdx.server.messages import checked_messages, checked_tools, is_long_chat
from pdx.server.sampling import SamplingDefaults, sampling_of_choices
from pdx.text.calls import CallForm
from pdx.text.chat_template import ChatTemplate
from pdx.text.reasoning import THINK_START
from pdx.text.tokenizer import Tokenizer

__all__ = ["Job", "Prompt", "ReadingOptions", "RequestChecker"]

_COMPLETION_MAX_TOKENS = 16
#: Longer texts and bodies are worked on in a thread: on the event loop they would hold up all
#: streams.
_INLINE_CHARS = 4096
_INLINE_BYTES = 64 << 10

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt and its choices."""

    token_ids: list[int]
    #: The prompt as the client wrote it; None where it sent token ids, or messages.
    text: str | None = None
    #: One for each choice.
    samplings: list[SamplingParams]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOptions:
    """How an answer is read from the tokens that come back. The same for all choices."""

    stops: tuple[str, ...] = ()
    #: The stop string, or the text of the stop token, stays in the answer.
    keep_stop: bool = False
    skip_special_tokens: bool = True
    with_logprobs: bool = False
    #: The answer begins with the prompt.
    echo: bool = False
    #: The one token that is generated is not part of the answer (``max_tokens: 0`` with ``echo``).
    drop_output: bool = False
    #: Reasoning is told from the answer.
    split_reasoning: bool = False
    #: The client wants reasoning in the content, with its tags.
    joins_reasoning: bool = False
    #: The prompt has begun the reasoning already.
    is_reasoning_open: bool = False
    #: The form in which tool calls are looked for; None: they are not.
    call_form: CallForm | None = None
    #: What the model was shown.
    tools: Sequence[Mapping[str, Any]] = ()
    #: At most one of them is told.
    one_tool_call: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request: what is submitted, and how the answer is read."""

    prompts: list[Prompt]
    reading: ReadingOptions
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestChecker:
    """All checks for one served model. The methods raise InvalidRequest or UnknownModel."""

    config: FrontendConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingDefaults
    #: Threads for long bodies and texts.
    pool: Executor
    #: Is given the names of unknown fields, which are dropped; None: they are refused.
    on_unknown: Callable[[str], None] | None = None

    async def parse(self, raw: bytes, kind: type[BodyT]) -> BodyT:
        """Decode a body and check its form and its model."""
        is_long = len(raw) > _INLINE_BYTES
        body: BodyT = await self._maybe_in_thread(is_long, parse_body, raw, kind, self.on_unknown)
        self.check_model(body.model)
        return body

    async def completion(self, body: CompletionBody) -> Job:
        """One choice or more for each prompt."""
        self._check_stream_options(body)
        self._check_list_len(body.prompt)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise InvalidRequest("best_of other than n is not served", param="best_of")
        is_long = _num_parts(body.prompt) > _INLINE_CHARS
        texts, id_lists = await self._maybe_in_thread(is_long, _split_prompt, body.prompt)
        self._check_num_streams(max(len(texts), len(id_lists)), body)
        if texts:
            add = body.add_special_tokens is not False
            id_lists = await self._encode(texts, "prompt", add_special_tokens=add)
        scored = body.logprobs if body.echo else None
        prompts = [
            Prompt(
                token_ids=ids,
                text=text,
                samplings=self._samplings(
                    ids, body, "prompt", _COMPLETION_MAX_TOKENS, body.logprobs, scored
                ),
            )
            for text, ids in itertools.zip_longest(texts, id_lists)
        ]
        await self._maybe_in_thread(is_long, self._check_ids, id_lists)
        reading = self._reading(
            body,
            with_logprobs=body.logprobs is not None,
            echo=bool(body.echo),
            drop_output=_asked_max(body) == 0,
        )
        return Job(prompts=prompts, reading=reading, cache_salt=body.cache_salt or "")

    async def chat(self, body: ChatBody) -> Job:
        """The one prompt that the chat template makes of the messages."""
        self._check_stream_options(body)
        self._check_num_streams(1, body)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        template = self._chat_template()
        _check_reasoning(body, template)
        tools = checked_tools(body.tools, body.tool_choice, template)
        text, [token_ids] = await self._encode_chat(body, tools, generate=True)
        self._check_ids([token_ids], "messages")  # a tokenizer may be larger than its model
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        samplings = self._samplings(token_ids, body, "messages", None, logprobs, None)
        joins_reasoning = body.separate_reasoning is False and body.include_reasoning is not False
        reading = self._reading(
            body,
            with_logprobs=bool(body.logprobs),
            split_reasoning=template.tags_reasoning and not joins_reasoning,
            joins_reasoning=template.tags_reasoning and joins_reasoning,
            is_reasoning_open=text.rstrip().endswith(THINK_START),
            call_form=template.call_form if tools else None,
            tools=tools,
            one_tool_call=body.parallel_tool_calls is False,
        )
        prompts = [Prompt(token_ids=token_ids, samplings=samplings)]
        return Job(prompts=prompts, reading=reading, cache_salt=body.cache_salt or "")

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Token ids of a text or of a chat."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        if body.prompt is not None:
            add = body.add_special_tokens is not False
            [token_ids] = await self._encode([body.prompt], None, add_special_tokens=add)
            return token_ids
        tools = checked_tools(body.tools, None, self._chat_template())
        generate = body.add_generation_prompt is not False
        _, [token_ids] = await self._encode_chat(body, tools, generate=generate)
        return token_ids

    async def token_strs(self, token_ids: list[int]) -> list[str | None]:
        """Each token as the vocabulary spells it."""

        def spell() -> list[str | None]:
            return list(map(self.tokenizer.token_of, token_ids))

        return await self._maybe_in_thread(len(token_ids) > _INLINE_CHARS, spell)

    async def detokenize(self, token_ids: list[int]) -> str:
        """Text of token ids, with special tokens."""

        def decode() -> str:
            self._check_ids([token_ids], "tokens")
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)

        return await self._maybe_in_thread(len(token_ids) > _INLINE_CHARS, decode)

    def check_model(self, name: str | None) -> None:
        """Only one model is served; a request may leave it out."""
        if name is not None and name != self.config.model_name:
            raise UnknownModel(
                f"the model {name[:200]!r} is not served here, {self.config.model_name!r} is",
                param="model",
            )

    def _chat_template(self) -> ChatTemplate:
        if self.template is None:
            raise InvalidRequest(f"the model {self.config.model_name} has no chat template")
        return self.template

    async def _encode_chat(
        self, body: ChatBody | TokenizeBody, tools: Sequence[Any], *, generate: bool
    ) -> tuple[str, list[list[int]]]:
        """The rendered text and its token ids."""
        messages = checked_messages(body.messages or ())
        template = self._chat_template()

        def render() -> str:
            return template.render(
                messages,
                tools=tools,
                variables=_template_variables(body),
                add_generation_prompt=generate,
            )

        text = await self._maybe_in_thread(is_long_chat(messages, tools), render)
        if not text:
            raise InvalidRequest("the chat template makes an empty prompt", param="messages")
        add = body.add_special_tokens is True
        param = "messages" if isinstance(body, ChatBody) else None
        return text, await self._encode([text], param, add_special_tokens=add)

    async def _encode(
        self, texts: Sequence[str], param: str | None, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Token ids of each text. ``param`` names the field of a prompt, which must fit into the
        context; None: it need not, and may have as many as can be sent back."""
        max_len = MAX_TOKENIZED_LEN if param is None else None

        def encode(some: Sequence[str]) -> list[list[int]]:
            for text in some:
                self._check_beginning(text, param)
            return self.tokenizer.encode_batch(
                some, add_special_tokens=add_special_tokens, max_len=max_len
            )

        is_long = sum(map(len, texts)) > _INLINE_CHARS
        return await self._maybe_in_thread(is_long, encode, texts)

    async def _maybe_in_thread(self, is_long: bool, work: Callable[..., T], *args: Any) -> T:
        if not is_long:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)

    def _check_beginning(self, text: str, param: str | None) -> None:
        """Refuse a huge text by its beginning, in time and memory that do not grow with it."""
        limit = MAX_TOKENIZED_LEN if param is None else self.config.context_len
        what = "text" if param is None else "prompt"
        allowed = f"at most {limit} are served"
        if param is not None:
            allowed = f"the model's context is {limit} tokens"
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidRequest(
                f"the {what} has {len(text)} characters; at most {MAX_TEXT_CHARS} characters and "
                f"{limit} tokens are served",
                param=param,
            )
        found = self.tokenizer.long_beginning(text, limit)
        if found is None:
            return
        num_chars, num_tokens = found
        raise InvalidRequest(
            f"the first {num_chars} characters of the {what} are {num_tokens} tokens already; "
            f"{allowed}",
            param=param,
        )

    def _check_list_len(self, prompt: Any) -> None:
        """Refuse a list that is far too long before each of its elements is looked at."""
        if isinstance(prompt, list) and len(prompt) > self.config.context_len:
            if isinstance(prompt[0], int):
                raise InvalidRequest(
                    f"the prompt has {len(prompt)} tokens; the model's context is "
                    f"{self.config.context_len} tokens",
                    param="prompt",
                )
            self._check_num_streams(len(prompt), GenerateBody())

    def _check_num_streams(self, num_prompts: int, body: GenerateBody) -> None:
        n, most = body.n or 1, self.config.max_streams
        if num_prompts * n > most:
            raise InvalidRequest(
                f"{num_prompts} prompts with {n} choices each are more than the {most} streams "
                "that this server runs at once",
                param="n" if n > 1 else "prompt",
            )

    def _check_stream_options(self, body: GenerateBody) -> None:
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest(
                "stream_options is only allowed with stream: true", param="stream_options"
            )

    def _check_ids(self, id_lists: Sequence[Sequence[int]], param: str = "prompt") -> None:
        for ids in filter(None, id_lists):
            wrong = next((i for i in (min(ids), max(ids)) if not self._is_id(i)), None)
            if wrong is not None:
                raise InvalidRequest(
                    f"token id {wrong} is outside the vocabulary of {self.config.vocab_size}",
                    param=param,
                )

    def _is_id(self, token_id: int) -> bool:
        return 0 <= token_id < self.config.vocab_size

    def _samplings(
        self,
        token_ids: list[int],
        body: GenerateBody,
        param: str,
        default_max: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> list[SamplingParams]:
        prompt_len, context_len = len(token_ids), self.config.context_len
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param=param)
        wanted = _asked_max(body)
        if wanted == 0 and not getattr(body, "echo", None):
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        # A default never refuses what would fit with less.
        room = max(1, context_len - prompt_len)
        # Nothing at all cannot be asked of the engine: one token is, and dropped.
        max_tokens = min(default_max or room, room) if wanted is None else max(wanted, 1)
        if prompt_len + max_tokens > context_len:
            raise InvalidRequest(
                f"the prompt has {prompt_len} tokens and {max_tokens} more may be generated, "
                f"{prompt_len + max_tokens} together; the model's context is {context_len} tokens",
                param=param if prompt_len >= context_len else "max_tokens",
            )
        return sampling_of_choices(
            body,
            self.defaults,
            self.config,
            self.tokenizer,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _reading(self, body: GenerateBody, **options: Any) -> ReadingOptions:
        stop = body.stop or ()
        return ReadingOptions(
            stops=(stop,) if isinstance(stop, str) else tuple(stop),
            keep_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            **options,
        )


def _check_reasoning(body: ChatBody, template: ChatTemplate) -> None:
    """Refuse to hold back reasoning in a stream. Of a model that tags none there is none to hold
    back, and nothing is streamed where the client wants no stream."""
    if body.stream_reasoning is False and body.stream and template.tags_reasoning:
        raise InvalidRequest(
            "stream_reasoning false is not served; leave the field out, or send null or true",
            param="stream_reasoning",
        )


def _template_variables(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """The template's own variables that the client sets. Templates that can be told how much to
    think look for ``reasoning_effort``; those that can only be told not to, for one of the others.
    """
    variables: dict[str, Any] = {}
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            variables |= {"enable_thinking": False, "thinking": False}
    return variables | (body.chat_template_kwargs or {})


def _asked_max(body: GenerateBody) -> int | None:
    asked = body.max_completion_tokens
    return body.max_tokens if asked is None else asked


def _num_parts(prompt: Any) -> int:
    """Ids or texts in a prompt that is a list."""
    if not isinstance(prompt, list):
        return 1
    return sum(len(each) if isinstance(each, list) else 1 for each in prompt)


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
