"""Reads one choice: from the tokens of its stream to text, reasoning, tool calls and scores.

Lives in the request's task. Tokens are taken one by one, so that a stop string ends the choice at
the very token that completes it, however many tokens an update carries.

Stop strings count in the answer, not in the reasoning in front of it: clients send them for the
text that they will read. In the answer they count as OpenAI's do, in the text that the model wrote,
also where that is a tool call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdx.request.batch import ScoredToken
from pdx.request.request import FinishReason, SamplingParams
from pdx.request.stream import StreamUpdate
from pdx.server.checks import Prompt, ReadingOptions
from pdx.server.deltas import Delta, EndReason, TokenScore
from pdx.text.calls import CallFinder, ToolCall
from pdx.text.reasoning import THINK_END, THINK_START, ReasoningSplitter
from pdx.text.stop_strings import StopStrings
from pdx.text.tokenizer import Tokenizer

__all__ = ["ChoiceReader"]


@dataclass(slots=True)
class _Taken:
    """What the tokens of one update add."""

    num_tokens: int = 0
    reasoning: list[str] = field(default_factory=list)
    answer: list[str] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)


class ChoiceReader:
    """One choice so far."""

    def __init__(
        self,
        idx: int,
        prompt: Prompt,
        sampling: SamplingParams,
        reading: ReadingOptions,
        tokenizer: Tokenizer,
    ) -> None:
        self._idx = idx
        self._prompt = prompt
        self._sampling = sampling
        self._reading = reading
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=reading.skip_special_tokens, shown=_tags(reading)
        )
        self._stops = StopStrings(reading.stops, keep=reading.keep_stop)
        self._reasoning = (
            ReasoningSplitter(is_open=reading.is_reasoning_open, finder=self._call_finder())
            if reading.split_reasoning
            else None
        )
        self._calls = self._call_finder()
        self._num_calls = 0
        self._must_echo = reading.echo
        #: Characters decoded so far, the echoed prompt's among them.
        self._text_len = 0
        #: Tokens generated, the one that ended the choice among them.
        self.num_tokens = 0
        self.finish_reason: EndReason | None = None

    @property
    def stopped_here(self) -> bool:
        """A stop string was found: the engine does not know that the choice has ended."""
        return self._stops.matched is not None

    def take(self, update: StreamUpdate) -> Delta:
        """Read one update. None may follow once ``finish_reason`` is there."""
        echo, scores = self._echo(update.prompt_logprobs) if self._must_echo else ("", ())
        if self._reading.drop_output:
            return self._finish_without_output(update, echo, scores)
        if self._reading.with_logprobs:
            assert len(update.logprobs) == len(update.token_ids), "the engine left out scores"
        taken = self._read_tokens(update)
        self.num_tokens += taken.num_tokens
        if self.stopped_here:
            self.finish_reason = "stop"
        elif update.finish_reason is not None:
            self._read_end(taken)
            # A stop string can be completed by what is flushed; it is a stop, whatever it was.
            self.finish_reason = "stop" if self.stopped_here else _end_of(update.finish_reason)
        num_calls_before = self._num_calls
        answer, calls = self._apart("".join(taken.answer))
        if self.finish_reason == "stop" and self._num_calls:
            self.finish_reason = "tool_calls"
        return Delta(
            choice_idx=self._idx,
            text=echo + answer,
            reasoning="".join(taken.reasoning),
            tool_calls=calls,
            num_calls_before=num_calls_before,
            token_ids=update.token_ids[: taken.num_tokens],
            scores=(*scores, *taken.scores),
            finish_reason=self.finish_reason,
        )

    def _call_finder(self) -> CallFinder | None:
        form = self._reading.call_form
        return None if form is None else CallFinder(form, self._reading.tools)

    def _read_tokens(self, update: StreamUpdate) -> _Taken:
        """Tokens up to the end of the choice."""
        taken = _Taken()
        last_idx = len(update.token_ids) - 1
        for idx, token_id in enumerate(update.token_ids):
            taken.num_tokens += 1
            if self._reading.with_logprobs:
                taken.scores.append(_score(update.logprobs[idx], self._text_len))
            ends = update.finish_reason is FinishReason.STOP and idx == last_idx
            if ends and self._is_hidden_stop(token_id):
                continue
            text = self._detokenizer.push((token_id,))
            self._text_len += len(text)
            text = self._without_reasoning(text, taken)
            if self.num_tokens + taken.num_tokens <= self._sampling.min_tokens:
                taken.answer.append(self._stops.skip(text))
                continue
            taken.answer.append(self._stops.push(text))
            if self.stopped_here:
                break
        return taken

    def _read_end(self, taken: _Taken) -> None:
        """Add what was held back, at the end of the output."""
        text = self._without_reasoning(self._detokenizer.flush(), taken)
        if self._reasoning is not None:
            reasoning, answer = self._reasoning.flush()
            taken.reasoning.append(reasoning)
            text += answer
        taken.answer.append(self._stops.push(text))
        if not self.stopped_here:
            taken.answer.append(self._stops.flush())

    def _without_reasoning(self, text: str, taken: _Taken) -> str:
        if self._reasoning is None:
            return text
        reasoning, answer = self._reasoning.push(text)
        taken.reasoning.append(reasoning)
        return answer

    def _is_hidden_stop(self, token_id: int) -> bool:
        """A stop token has no place in the text; it may be an ordinary one that has words."""
        return token_id in self._sampling.stop_token_ids and not self._reading.keep_stop

    def _apart(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Words and tool calls in a piece of the answer."""
        if self._calls is None:
            return text, ()
        text, calls = self._calls.push(text)
        if self.finish_reason is not None:
            more_text, more_calls = self._calls.flush()
            text, calls = text + more_text, calls + more_calls
        if self._reading.one_tool_call:
            calls = calls[: 1 - self._num_calls]
        self._num_calls += len(calls)
        return text, tuple(calls)

    def _echo(self, scored: Sequence[ScoredToken]) -> tuple[str, tuple[TokenScore, ...]]:
        """The prompt as the beginning of the answer, once."""
        self._must_echo = False
        token_ids = self._prompt.token_ids
        text = self._prompt.text
        if text is None:
            skip = self._reading.skip_special_tokens
            text = self._tokenizer.decode(token_ids, skip_special_tokens=skip)
        scores: list[TokenScore] = []
        if self._reading.with_logprobs:
            assert len(scored) == len(token_ids) - 1, "the engine left out the prompt's scores"
            offsets = self._offsets(token_ids)
            scores.append(TokenScore(token_id=token_ids[0], text_offset=0, logprob=None, top=None))
            pairs = zip(scored, offsets[1:], strict=True)
            scores += [_score(token, min(offset, len(text))) for token, offset in pairs]
        self._text_len = len(text)
        return text, tuple(scores)

    def _offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Where each token's text begins."""
        skip = self._reading.skip_special_tokens
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skip)
        offsets, offset = [], 0
        for token_id in token_ids:
            offsets.append(offset)
            offset += len(detokenizer.push((token_id,)))
        return offsets

    def _finish_without_output(
        self, update: StreamUpdate, echo: str, scores: tuple[TokenScore, ...]
    ) -> Delta:
        if update.finish_reason is not None:
            self.finish_reason = "length"
        return Delta(
            choice_idx=self._idx, text=echo, scores=scores, finish_reason=self.finish_reason
        )


def _tags(reading: ReadingOptions) -> frozenset[str]:
    """What an answer is taken apart by, here or by the client. Some tokenizers have special tokens
    for it."""
    calls = frozenset[str]() if reading.call_form is None else reading.call_form.tags
    tags_reasoning = reading.split_reasoning or reading.joins_reasoning
    return calls | ({THINK_START, THINK_END} if tags_reasoning else frozenset())


def _score(token: ScoredToken, text_offset: int) -> TokenScore:
    return TokenScore(
        token_id=token.token_id, text_offset=text_offset, logprob=token.logprob, top=token.top
    )


def _end_of(reason: FinishReason) -> EndReason:
    return "stop" if reason is FinishReason.STOP else "length"
