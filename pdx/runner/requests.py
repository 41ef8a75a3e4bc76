"""What a rank knows of each request, and how a batch's deltas change it. The rank's main thread."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdx.errors import InternalError
from pdx.kernels.batch import ForwardBatch
from pdx.kernels.reference.verify_drafts import count_standing
from pdx.request.batch import Batch, RequestStart, RequestStep
from pdx.request.request import SamplingParams
from pdx.runner.logit_rules import LogitRules
from pdx.runner.page_tables import PageTable, PageTableArray
from pdx.runner.prompt_scores import ScoreSpan

if TYPE_CHECKING:
    TokenIds = array[int]

__all__ = ["Draw", "PassInputs", "RequestTable", "StepRows"]


class Draw(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One token to be sampled from a row of the pass."""

    request_id: int
    #: Row of the pass's [T, ...] tensors.
    row: int
    sampling: SamplingParams
    #: Index of the token in the request's output, for Philox(seed, i).
    output_idx: int
    #: What the request changes in its logits, and the output so far that this goes by (empty where
    #: there are no rules).
    rules: LogitRules | None = None
    output_ids: tuple[int, ...] = ()


class StepRows(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A step's rows of the pass, from ``row`` on."""

    request_id: int
    row: int
    #: Position of the first of them.
    begin: int
    num_rows: int
    #: The token of the last row, where it is a draft.
    draft_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInputs:
    """A batch, turned into what the model takes."""

    batch: ForwardBatch
    #: One for each request that samples, or two, one after the other, where it has a draft.
    draws: tuple[Draw, ...]
    steps: tuple[StepRows, ...]
    #: Rows whose logits score prompts.
    score_spans: tuple[ScoreSpan, ...]
    #: (page, first unused token): what to zero before the pass, in all layers.
    zero_tails: tuple[tuple[int, int], ...]


@dataclass(slots=True, kw_only=True)
class RankRequest:
    #: int32.
    token_ids: TokenIds
    prompt_len: int
    num_computed: int
    sampling: SamplingParams | None
    rules: LogitRules | None
    #: How many alternatives to score the prompt with; None: it is not scored.
    prompt_logprobs: int | None
    #: What follows ``token_ids`` where this rank does not sample it.
    next_token_id: int | None
    page_table: PageTable = field(default_factory=PageTable)
    #: A guess at what follows the last of ``token_ids``.
    draft_id: int | None = None


class RequestTable:
    """All live requests by id; mutable, owned by the runner.

    Whatever does not fit together is an InternalError, which ends the rank: the primary and its
    rank then disagree about what lies in which page, and nothing that they produce can be trusted.
    """

    def __init__(
        self, *, page_size: int, num_pages: int, vocab_size: int, decode_rows: int = 1
    ) -> None:
        """
        Args:
            decode_rows: rows at most of a request that decodes: one, and one for each draft.
        """
        self._page_size = page_size
        self._num_pages = num_pages
        self._vocab_size = vocab_size
        self._decode_rows = decode_rows
        self._requests: dict[int, RankRequest] = {}
        self._page_tables = PageTableArray()
        self._last_pass_idx = 0

    def __len__(self) -> int:
        return len(self._requests)

    def begin_pass(self, batch: Batch, progress_base: int = 0) -> PassInputs:
        """Apply removes, starts and steps, in order; the steps' tokens count as computed then.

        Args:
            batch: what the primary sent.
            progress_base: the pass's first progress word.
        """
        if batch.pass_idx != self._last_pass_idx + 1:
            raise InternalError(f"pass {batch.pass_idx} came after pass {self._last_pass_idx}")
        self._last_pass_idx = batch.pass_idx
        for request_id in batch.removes:
            request = self._requests.pop(request_id, None)
            if request is None:
                raise InternalError(f"request {request_id} is to be removed but unknown")
            self._page_tables.free(request.page_table)
        for start in batch.starts:
            self._start(start)
        return self._collect(batch.steps, progress_base)

    def append_sampled(self, request_id: int, *token_ids: int) -> int:
        """What a request's draws gave, from the row of its last token and those of drafts behind
        it; the last that stands is the request's next input.

        Returns:
            How many stand: all up to the first wrong draft.
        """
        request = self._requests[request_id]
        drafts = [] if len(token_ids) == 1 else [request.draft_id]
        num_standing = count_standing(token_ids, drafts)
        request.token_ids.extend(token_ids[:num_standing])
        request.num_computed += num_standing - 1
        return num_standing

    def next_ids(self, step: StepRows) -> list[int]:
        """The token that follows each row of a step that has been sampled; 0 where none is known,
        which is behind a wrong draft.
        """
        token_ids = self._requests[step.request_id].token_ids
        known = token_ids[step.begin + 1 : step.begin + 1 + step.num_rows]
        return [*known, *[0] * (step.num_rows - len(known))]

    def row_to_draft_from(self, step: StepRows) -> int | None:
        """The row of a sampled step behind which a draft is of use: the request samples in its
        next one. The draft before is used up.
        """
        request = self._requests[step.request_id]
        request.draft_id = None
        if request.sampling is None or request.num_computed != len(request.token_ids) - 1:
            return None
        return step.row + request.num_computed - 1 - step.begin

    def set_draft(self, request_id: int, draft_id: int) -> None:
        """What may follow the request's last token."""
        self._requests[request_id].draft_id = draft_id

    def _start(self, start: RequestStart) -> None:
        if start.request_id in self._requests:
            raise InternalError(f"request {start.request_id} is started twice")
        if not 0 <= start.num_computed < len(start.token_ids):
            raise InternalError(
                f"request {start.request_id} starts with {start.num_computed} of its "
                f"{len(start.token_ids)} tokens computed"
            )
        vocab_size = self._vocab_size
        prompt_len = len(start.token_ids) - start.first_output_idx
        if not 0 < prompt_len <= len(start.token_ids):
            raise InternalError(
                f"request {start.request_id} starts with {start.first_output_idx} output tokens "
                f"among its {len(start.token_ids)}"
            )
        token_ids = np.array(start.token_ids, dtype=np.int64)
        next_id = start.next_token_id or 0
        if not 0 <= min(token_ids.min(), next_id) <= max(token_ids.max(), next_id) < vocab_size:
            raise InternalError(f"request {start.request_id} has token ids past the vocabulary")
        rules = None
        if start.sampling is not None:
            prompt_ids = start.token_ids[:prompt_len]
            rules = LogitRules.of(start.sampling, prompt_ids, vocab_size)
        self._requests[start.request_id] = RankRequest(
            token_ids=array("i", token_ids.astype(np.int32).tobytes()),
            prompt_len=prompt_len,
            num_computed=start.num_computed,
            sampling=start.sampling,
            rules=rules,
            prompt_logprobs=start.prompt_logprobs,
            next_token_id=start.next_token_id,
        )

    def _collect(self, steps: list[RequestStep], progress_base: int) -> PassInputs:
        if len({step.request_id for step in steps}) != len(steps):
            raise InternalError("a request has two steps in one pass")
        token_ids: TokenIds = array("i")
        draws: list[Draw] = []
        score_spans: list[ScoreSpan] = []
        rows: list[StepRows] = []
        zero_tails: list[tuple[int, int]] = []
        table_starts: list[int] = []
        for step, request in self._in_order([(step, self._checked(step)) for step in steps]):
            begin, end = request.num_computed, request.num_computed + step.num_tokens
            row = len(token_ids)
            if request.prompt_logprobs is not None:
                score_spans += _score_span(step, request, request.prompt_logprobs, row)
            draft_id = request.draft_id if step.may_draft else None
            token_ids += request.token_ids[begin:end]
            if step.sample:
                draws.append(self._draw(step.request_id, request, end, row + step.num_tokens - 1))
            if draft_id is not None:
                token_ids.append(draft_id)
                draws.append(_behind(draws[-1], draft_id))
            rows.append(
                StepRows(
                    request_id=step.request_id,
                    row=row,
                    begin=begin,
                    num_rows=len(token_ids) - row,
                    draft_id=draft_id,
                )
            )
            table_starts.append(request.page_table.start)
            last_page, used = (end - 1) // self._page_size, (end - 1) % self._page_size + 1
            if step.zero_last_page and used < self._page_size:
                pages = self._page_tables.pages
                zero_tails.append((int(pages[request.page_table.start + last_page]), used))
            request.num_computed = end
        return PassInputs(
            batch=ForwardBatch.of(
                page_size=self._page_size,
                decode_rows=self._decode_rows,
                token_ids=np.array(token_ids, dtype=np.int32),
                begins=_int32([each.begin for each in rows]),
                query_lens=_int32([each.num_rows for each in rows]),
                table_starts=_int32(table_starts),
                page_tables=self._page_tables.pages,
                progress_base=progress_base,
            ),
            draws=tuple(draws),
            steps=tuple(rows),
            score_spans=tuple(score_spans),
            zero_tails=tuple(zero_tails),
        )

    def _in_order(
        self, steps: list[tuple[RequestStep, RankRequest]]
    ) -> list[tuple[RequestStep, RankRequest]]:
        """Those that decode first, as a batch has them; otherwise in the order they came in."""

        def is_chunk(each: tuple[RequestStep, RankRequest]) -> bool:
            step, request = each
            is_drafted = step.may_draft and request.draft_id is not None
            return step.num_tokens + is_drafted > self._decode_rows

        return sorted(steps, key=is_chunk)

    def _checked(self, step: RequestStep) -> RankRequest:
        request = self._requests.get(step.request_id)
        if request is None:
            raise InternalError(f"a step names request {step.request_id}, which is unknown")
        if step.new_page_indices:
            if not all(0 <= page_idx < self._num_pages for page_idx in step.new_page_indices):
                raise InternalError(
                    f"request {step.request_id} got pages {step.new_page_indices} "
                    f"of {self._num_pages}"
                )
            self._page_tables.append(request.page_table, step.new_page_indices)
        end = request.num_computed + step.num_tokens
        if step.num_tokens < 1 or end > len(request.token_ids):
            raise InternalError(
                f"request {step.request_id} is to run {step.num_tokens} tokens from position "
                f"{request.num_computed} of {len(request.token_ids)}"
            )
        if step.may_draft and not step.sample:
            raise InternalError(f"request {step.request_id} may draft and does not sample")
        if end + step.may_draft > request.page_table.num_pages * self._page_size:
            raise InternalError(
                f"request {step.request_id} is to run to position {end + step.may_draft} with "
                f"{request.page_table.num_pages} pages of {self._page_size}"
            )
        return request

    def _draw(self, request_id: int, request: RankRequest, end: int, row: int) -> Draw:
        # A token that is already known would have to be overwritten.
        if request.sampling is None or end != len(request.token_ids):
            raise InternalError(f"request {request_id} cannot sample at position {end}")
        return Draw(
            request_id=request_id,
            row=row,
            sampling=request.sampling,
            output_idx=len(request.token_ids) - request.prompt_len,
            rules=request.rules,
            output_ids=tuple(request.token_ids[request.prompt_len :]) if request.rules else (),
        )


def _behind(draw: Draw, draft_id: int) -> Draw:
    """The draw of the next row, as it is if the first one gives the draft."""
    return msgspec.structs.replace(
        draw,
        row=draw.row + 1,
        output_idx=draw.output_idx + 1,
        output_ids=(*draw.output_ids, draft_id) if draw.rules else (),
    )


def _score_span(step: RequestStep, request: RankRequest, num_top: int, row: int) -> list[ScoreSpan]:
    """What a step scores of its request's prompt, if anything: called before it is counted."""
    begin, end = request.num_computed, request.num_computed + step.num_tokens
    targets = request.token_ids[begin + 1 : min(end + 1, request.prompt_len)].tolist()
    if end == request.prompt_len and request.next_token_id is not None:
        targets.append(request.next_token_id)
    if not targets:
        return []
    span = ScoreSpan(
        request_id=step.request_id,
        row=row,
        first_position=begin + 1,
        target_ids=tuple(targets),
        num_top=num_top,
    )
    return [span]


def _int32(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)
