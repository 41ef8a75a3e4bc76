"""Decides what runs in the next forward pass: continuous batching with chunked prefill, on any
role.

Owned by the primary's event loop. Touches no tensor, knows no socket and no clock. The life of a
request:

    submit -> WAITING --admit (pages leased)--> ADMITTED --start--> RUNNING --finish/abort--> gone
                 ^                                  |                  |
                 +------------ requeue -------------+---- preempted ---+

A colocated engine and a prefiller start what they admit at once; a decoder starts it when the KV
cache has arrived. Who comes next is said in ``pdx.scheduler.order``. A request that runs out of
pages preempts the youngest, which later resumes with prompt and output as its new prompt.

With a prefix cache, pages are published as soon as all of their tokens are computed, by the hash of
all tokens up to their end; a request begins with the published pages of its longest known prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from pdx.errors import InvalidRequest
from pdx.kv.pages import PagePool, Use
from pdx.request.batch import (
    Batch,
    PromptScores,
    RequestStep,
    SampledToken,
    ScoredToken,
    StepOutput,
)
from pdx.request.ids import IdArray
from pdx.request.request import SamplingParams
from pdx.scheduler.order import admission_order, fill_chunk
from pdx.scheduler.passes import (
    ScheduledPass,
    by_request,
    chunk_of,
    finish_reason,
    logprobs_of,
    start_message,
    step_of,
)
from pdx.scheduler.prefixes import PrefixSharing
from pdx.scheduler.request import PromptScoring, Request, RequestState, RequestUpdate

__all__ = ["Scheduler", "SchedulerLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a scheduler."""

    page_size: int
    #: Prefill tokens in one pass.
    chunk_len: int
    #: Requests that hold pages at once.
    max_num_seqs: int
    #: Output tokens for which pages are leased at admission; growth past it may preempt.
    reserve_output_len: int
    #: Whether ranks have a layer that drafts: steps may then feed a draft.
    drafts: bool = False


class Scheduler:
    """See the module's docstring.

    Args:
        cache_root: names what the KV depends on besides tokens; None: no prefix cache.
    """

    def __init__(
        self, limits: SchedulerLimits, pool: PagePool, cache_root: str | None = None
    ) -> None:
        self.limits = limits
        self._prefixes = PrefixSharing(pool, limits.page_size, cache_root)
        self.pool = pool
        self._waiting: deque[Request] = deque()
        #: ADMITTED and RUNNING, oldest first (dicts keep order).
        self._active: dict[int, Request] = {}
        #: Requests in the pass that runs now, in the batch's order.
        self._in_pass: list[Request] = []
        self._removes: list[int] = []
        self._last_pass_idx = 0
        self.num_drafts = self.num_right_drafts = 0  # fed by ranks; what was sampled
        #: Times that a running request gave its pages to an older one.
        self.num_preemptions = 0
        self._has_hashed = False

    # ---- requests come and go -------------------------------------------------------------

    def submit(
        self,
        request_id: int,
        token_ids: Iterable[int],
        sampling: SamplingParams | None,
        scoring: PromptScoring | None = None,
        cache_salt: str = "",
        group: int = 0,
    ) -> None:
        """Queue a request.

        Args:
            scoring: where its prompt is prefilled and scored here.
            cache_salt: only requests with the same one share pages of the prefix cache.
            group: whom it is for; groups are treated alike, whatever they ask.

        Raises:
            InvalidRequest: it could never fit this node's pages.
        """
        ids = IdArray(token_ids)
        request = Request(request_id, ids, len(ids), sampling, scoring, cache_salt, group)
        assert ids and request_id not in self._active
        needed = self._num_pages_for(request.max_len())
        if needed > self.pool.num_pages:
            raise InvalidRequest(
                f"the request needs {needed} KV pages of {self.limits.page_size} tokens "
                f"({request.max_len()} tokens), this node has {self.pool.num_pages}",
                hint="shorten the prompt, lower max_tokens, or start the node with more KV memory",
            )
        self._waiting.append(request)
        self._prefixes.hash_later(request)

    @property
    def is_hashing(self) -> bool:
        """Some prompts' pages are not hashed yet, or many pages have to leave the cache for one:
        they are admitted after that. Or some that ended are not published whole, and have their
        pages until then.
        """
        return self._prefixes.is_busy

    def hash_some(self) -> None:
        """Hash pages of waiting prompts (or publish those of ended ones, or evict), a slice of the
        event loop's time at most. The next admit() does not do it again.
        """
        self._prefixes.go_on()
        self._has_hashed = True

    def admit(self, held: Collection[int] = ()) -> list[Request]:
        """Lease pages for waiting requests, in their order, until one does not fit. Those whose
        next page is being computed wait for it; those that are not hashed yet, for that.

        Args:
            held: requests that wait for something else.
        """
        admitted: list[Request] = []
        if not self._has_hashed:
            self.hash_some()  # also of prompts whose requests have left: nobody else forgets them
        self._has_hashed = False
        if not self._waiting:
            return admitted
        being_computed = self._prefixes.next_keys(self._active.values())
        for request in admission_order(self._waiting, self._active.values()):
            if len(self._active) >= self.limits.max_num_seqs:
                break
            if request.request_id in held or not self._prefixes.is_hashed(request):
                continue
            shared = self._prefixes.known(request)
            if self._prefixes.lacks(request, len(shared)) in being_computed:
                continue
            num_fresh = self._num_pages_at_admission(request) - len(shared)
            lease_id = self._prefixes.lease(num_fresh, shared)
            if lease_id is None:
                break
            self._waiting.remove(request)
            request.lease_id = lease_id
            request.num_published = len(shared)
            request.num_cached = len(shared) * self.limits.page_size
            request.state = RequestState.ADMITTED
            self._active[request.request_id] = request
            admitted.append(request)
            being_computed |= self._prefixes.next_keys([request])
        return admitted

    def start(
        self,
        request_id: int,
        *,
        num_computed: int | None = None,
        scoring: PromptScoring | None = None,
    ) -> None:
        """Let an admitted request take part in passes.

        Args:
            num_computed: so many of its tokens are in its pages already (None: those that its
                prefix shares).
            scoring: its prompt is prefilled and scored here, which was not known when it came.
        """
        request = self._active[request_id]
        assert request.state is RequestState.ADMITTED
        request.scoring = scoring or request.scoring
        request.state = RequestState.RUNNING
        request.num_computed = request.num_cached if num_computed is None else num_computed
        self._prefixes.publish_some(request)

    def abort(self, request_id: int) -> None:
        """End a request, wherever it is; unknown ids are fine. Pages follow the pool's rules."""
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                request.state = RequestState.ENDED
                return
        active = self._active.get(request_id)
        if active is not None and active.state is not RequestState.ENDED:
            self._end(active)

    def requeue(self, request_id: int) -> None:
        """An admitted request waits again, first in the queue, with other pages next time."""
        self._preempt(self._active[request_id])

    def waiting(self) -> list[Request]:
        """Queued requests, next one first."""
        return list(self._waiting)

    def request(self, request_id: int) -> Request | None:
        """An admitted or running request."""
        return self._active.get(request_id)

    def lacks_one_page_at_most(self, request: Request) -> bool:
        """Whether earlier requests left all of an admitted one but for a part of its last page."""
        return self._prefixes.lacks_one_page_at_most(request)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        return len(self._active)

    # ---- passes ---------------------------------------------------------------------------

    def schedule(self) -> ScheduledPass | None:
        """The next pass; None when nothing can run. Decode steps come first, then prefill chunks in
        order.
        """
        assert not self._in_pass, "the pass before has not been processed"
        decodes = self._schedule_decodes()
        prefills = self._schedule_prefills()
        if not decodes and not prefills and not self._removes:
            return None
        self._last_pass_idx += 1
        self._in_pass = [*decodes, *(request for request, _ in prefills)]
        new = [request for request in self._in_pass if not request.on_rank]
        starts = [start_message(request) for request in new]
        for request in new:
            request.on_rank = True
        steps = [self._step(s, 1, may_draft=self._may_draft(s)) for s in decodes]
        steps += [self._step(s, n) for s, n in prefills]
        removes, self._removes = self._removes, []
        batch = Batch(pass_idx=self._last_pass_idx, starts=starts, steps=steps, removes=removes)
        chunks = [chunk_of(s, self._last_pass_idx, self._pages_of(s)) for s, _ in prefills]
        return ScheduledPass(batch=batch, chunks=chunks)

    def postprocess(self, output: StepOutput) -> list[RequestUpdate]:
        """Take in a pass's result; returns what changed, in the batch's order, without ended
        requests.
        """
        assert output.pass_idx == self._last_pass_idx
        sampled = by_request(output.tokens)
        self.num_drafts += output.num_drafts
        self.num_right_drafts += len(output.tokens) - len(sampled)
        scores = {scored.request_id: scored for scored in output.prompt_scores}
        updates = []
        for request in self._in_pass:
            assert request.lease_id is not None
            self.pool.drop(request.lease_id, Use.PASS)
            request.num_computed += request.num_in_pass
            request.num_in_pass = 0
            if request.state is RequestState.ENDED:
                self._forget(request)
            else:
                self._prefixes.publish_some(request)
                request_id = request.request_id
                update = self._advance(request, sampled.get(request_id, []), scores.get(request_id))
                if update is not None:
                    updates.append(update)
        self._in_pass = []
        return updates

    # ---- inside ---------------------------------------------------------------------------

    def _advance(
        self, request: Request, sampled: list[SampledToken], scores: PromptScores | None
    ) -> RequestUpdate | None:
        request_id = request.request_id
        if not sampled:
            prefilled = request.sampling is None and request.prefill_done
            if prefilled:
                self._end(request)
            if not prefilled and scores is None:
                return None
            return RequestUpdate(request_id=request_id, prefilled=prefilled, prompt_scores=scores)
        assert request.sampling is not None
        token_ids: list[int] = []
        logprobs: list[ScoredToken] = []
        reason = None
        for token in sampled:
            # What a second token was sampled behind: the draft that was right.
            request.num_computed += bool(token_ids)
            request.token_ids.append(token.token_id)
            token_ids.append(token.token_id)
            logprobs += logprobs_of(token, request.sampling)
            reason = finish_reason(request, token.token_id, request.sampling)
            if reason is not None:
                self._end(request)
                break
        return RequestUpdate(
            request_id=request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_scores=scores,
            finish_reason=reason,
        )

    def _schedule_decodes(self) -> list[Request]:
        decodes: list[Request] = []
        for request in list(self._active.values()):
            if not self._ready(request) or request.sampling is None or not request.prefill_done:
                continue
            if self._grow(request):
                decodes.append(request)
        return decodes

    def _schedule_prefills(self) -> list[tuple[Request, int]]:
        able = [s for s in self._active.values() if self._ready(s) and not s.prefill_done]
        filled = fill_chunk(able, self.limits.chunk_len)
        for request, num_passes in filled.passed_over:
            request.num_passed_over = num_passes
        return filled.chosen

    @staticmethod
    def _ready(request: Request) -> bool:
        return request.state is RequestState.RUNNING

    def _grow(self, request: Request) -> bool:
        """Make sure there is a page for the next position; False if the request itself was
        preempted.
        """
        assert request.lease_id is not None
        while True:
            wanted = self._num_pages_for(len(request.token_ids))
            missing = wanted - self.pool.num_pages_of(request.lease_id)
            if missing <= 0 or self.pool.extend(request.lease_id, missing) is not None:
                return True
            victim = next(s for s in reversed(self._active.values()) if self._ready(s))
            self._preempt(victim)
            self.num_preemptions += 1
            if victim is request:
                return False

    def _preempt(self, request: Request) -> None:
        self._end(request, self._prefixes.leave_at_once)
        fresh = Request(
            request.request_id,
            request.token_ids,
            request.prompt_len,
            request.sampling,
            # Scores go by position, so that some may come again.
            scoring=None if request.prefill_done else request.scoring,
            cache_salt=request.cache_salt,
            group=request.group,
            page_keys=request.page_keys,
        )
        self._waiting.appendleft(fresh)
        self._prefixes.hash_later(fresh)

    def _end(self, request: Request, leave: Callable[[Request], None] | None = None) -> None:
        """Give the pages up; the request leaves now, or with the pass that carries it."""
        request.state = RequestState.ENDED
        (leave or self._prefixes.leave)(request)
        if not request.num_in_pass:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        if self._active.get(request.request_id) is request:
            del self._active[request.request_id]
        if request.on_rank:
            self._removes.append(request.request_id)

    def _may_draft(self, request: Request) -> bool:
        """Two more tokens are wanted, and there is a page for one more; nobody is preempted."""
        assert request.lease_id is not None and request.sampling is not None
        if not self.limits.drafts or request.output_len + 2 > request.sampling.max_tokens:
            return False
        missing = self._num_pages_for(len(request.token_ids) + 1) - len(self._pages_of(request))
        return missing <= 0 or self.pool.extend(request.lease_id, missing) is not None

    def _step(self, request: Request, num_tokens: int, *, may_draft: bool = False) -> RequestStep:
        assert request.lease_id is not None
        self.pool.hold(request.lease_id, Use.PASS)
        new_pages = self.pool.page_indices(request.lease_id, request.num_pages_sent)
        request.num_in_pass = num_tokens
        request.num_pages_sent += len(new_pages)
        return step_of(request, num_tokens, new_pages, may_draft=may_draft)

    def _pages_of(self, request: Request) -> tuple[int, ...]:
        assert request.lease_id is not None
        return self.pool.page_indices(request.lease_id)

    def _num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.page_size)

    def _num_pages_at_admission(self, request: Request) -> int:
        reserve = 0
        if request.sampling is not None:
            left = request.sampling.max_tokens - request.output_len
            reserve = min(left, self.limits.reserve_output_len)
        return self._num_pages_for(len(request.token_ids) + reserve)
