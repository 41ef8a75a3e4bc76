"""What requests change in their logits before tokens are drawn, as lists of tokens, which the op
``apply_rules`` takes. The rank's main thread.

In this order, on float32 logits: ``logit_bias`` is added; the repetition penalty divides positive
and multiplies negative logits of tokens in prompt or output; the presence penalty is taken from
tokens in the output once, and the frequency penalty for each time they are in it; the stop tokens
cannot be drawn before ``min_tokens``. Greedy requests obey all of it. Temperature and filters come
afterwards.

What a prompt and the parameters settle is listed once, when the request starts; a step adds what
the output has in the meantime. All requests of a step at once, and in numpy: with an operation for
each request and column, the host would be slower than the device that waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdx.request.request import SamplingParams

__all__ = ["RULE_COLUMNS", "LogitRules", "rule_arrays"]

#: What ``apply_rules`` takes of the rules, in its order.
RULE_COLUMNS = ("starts", "token_ids", "bias", "seen", "cost", "held", "repetition")
_Value = TypeVar("_Value", bound=np.generic)
#: A row and a token are one number, in the order of rows, then tokens.
_ROW_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitRules:
    """One request's rules, which name R tokens; never changed, so that a step may be repeated."""

    sampling: SamplingParams
    #: [R], ascending, without repeats.
    token_ids: NDArray[np.int64]
    #: [R].
    bias: NDArray[np.float32]
    #: [R] each: whether it is in the prompt, where the repetition penalty changes something;
    #: whether ``min_tokens`` may hold it back.
    in_prompt: NDArray[np.bool_]
    is_stop: NDArray[np.bool_]

    @classmethod
    def of(
        cls, sampling: SamplingParams, prompt_ids: Iterable[int], vocab_size: int
    ) -> LogitRules | None:
        """The rules of a request; None: its logits stay as they are.

        Ids past the vocabulary are left out: no row of logits has them, so nothing would change.
        """
        repeats = sampling.repetition_penalty != 1
        penalised = repeats or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        held_back = sampling.stop_token_ids if sampling.min_tokens > 0 else ()
        if not penalised and not sampling.logit_bias and not held_back:
            return None
        bias_ids, seen, stop_ids = (
            np.array([i for i in ids if 0 <= i < vocab_size], np.int64)
            for ids in (sampling.logit_bias, set(prompt_ids) if repeats else (), held_back)
        )
        token_ids = np.unique(np.concatenate([bias_ids, seen, stop_ids]))
        bias = np.zeros(len(token_ids), np.float32)
        bias[np.searchsorted(token_ids, bias_ids)] = [sampling.logit_bias[int(i)] for i in bias_ids]
        return cls(
            sampling=sampling,
            token_ids=token_ids,
            bias=bias,
            in_prompt=np.isin(token_ids, seen),
            is_stop=np.isin(token_ids, stop_ids),
        )


def rule_arrays(rows: Sequence[tuple[LogitRules | None, Sequence[int]]]) -> dict[str, Tensor]:
    """What ``apply_rules`` reads of N rows (rules, output so far), by column; on the host."""
    numbered = [(row, rules, output) for row, (rules, output) in enumerate(rows) if rules]
    lists, outputs = [rules for _, rules, _ in numbered], [output for *_, output in numbered]
    listed = _PlacedRows.of(len(rows), [row for row, *_ in numbered], lists, outputs)
    params = [rules.sampling for rules in lists]
    presence, frequency = (
        np.array([getattr(each, name) for each in params], np.float32)
        for name in ("presence_penalty", "frequency_penalty")
    )
    may_hold = [len(output) < each.min_tokens for each, output in zip(params, outputs, strict=True)]
    held = np.concatenate(
        [rules.is_stop & hold for rules, hold in zip(lists, may_hold, strict=True)]
    )
    owner, counts = listed.output_owner, listed.output_counts.astype(np.float32)
    seen = listed.column(np.concatenate([rules.in_prompt for rules in lists]))
    seen[listed.output_at] = True
    cost = np.zeros(len(listed.token_ids), np.float32)
    cost[listed.output_at] = presence[owner] + frequency[owner] * counts
    repetition = np.ones(len(rows))
    repetition[[row for row, *_ in numbered]] = [each.repetition_penalty for each in params]
    columns = (
        listed.starts,
        listed.token_ids,
        listed.column(np.concatenate([rules.bias for rules in lists])),
        seen,
        cost,
        listed.column(held),
        repetition,
    )
    return {
        name: torch.from_numpy(column) for name, column in zip(RULE_COLUMNS, columns, strict=True)
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PlacedRows:
    """Where tokens lie in the columns: in each row its list, then what only the output has."""

    #: int32 [N + 1], and int32 [R].
    starts: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    #: Places of the lists' tokens, one list after the other.
    list_at: NDArray[np.int64]
    #: The outputs' distinct tokens: where each is, which list's output has it, and how often.
    output_at: NDArray[np.int64]
    output_owner: NDArray[np.int64]
    output_counts: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        num_rows: int,
        row_of_list: Sequence[int],
        lists: Sequence[LogitRules],
        outputs: Sequence[Sequence[int]],
    ) -> _PlacedRows:
        num_lists = len(lists)
        list_lens: NDArray[np.int64] = np.array([len(rules.token_ids) for rules in lists])
        output_lens = np.array([len(output) for output in outputs])
        owner = np.repeat(np.arange(num_lists), list_lens)
        ids = np.concatenate([rules.token_ids for rules in lists])
        flat = np.fromiter(chain.from_iterable(outputs), np.int64, int(output_lens.sum()))
        found: tuple[NDArray[np.int64], NDArray[np.int64]] = np.unique(
            (np.repeat(np.arange(num_lists), output_lens) << _ROW_BITS) | flat, return_counts=True
        )
        keys, counts = found
        output_owner, output_ids = keys >> _ROW_BITS, keys & ((1 << _ROW_BITS) - 1)
        list_keys: NDArray[np.int64] = (owner << _ROW_BITS) | ids
        place: NDArray[np.int64] = np.searchsorted(list_keys, keys)
        is_known: NDArray[np.bool_] = place < len(list_keys)
        is_known[is_known] = list_keys[place[is_known]] == keys[is_known]
        new_owner = output_owner[~is_known]
        new_lens: NDArray[np.int64] = np.bincount(new_owner, minlength=num_lists)

        begins = _begins(list_lens + new_lens)
        list_at = np.arange(len(ids)) + (begins - _begins(list_lens))[owner]
        new_at = np.arange(len(new_owner)) + (begins + list_lens - _begins(new_lens))[new_owner]
        output_at = np.empty(len(keys), np.int64)
        output_at[is_known], output_at[~is_known] = list_at[place[is_known]], new_at
        token_ids = np.empty(len(ids) + len(new_owner), np.int32)
        token_ids[list_at], token_ids[new_at] = ids, output_ids[~is_known]
        lengths = np.zeros(num_rows + 1, np.int32)
        lengths[np.array(row_of_list) + 1] = list_lens + new_lens
        return cls(
            starts=np.cumsum(lengths, dtype=np.int32),
            token_ids=token_ids,
            list_at=list_at,
            output_at=output_at,
            output_owner=output_owner,
            output_counts=counts,
        )

    def column(self, values: NDArray[_Value]) -> NDArray[_Value]:
        """The lists' values where they belong; 0 for what only an output has."""
        column = np.zeros(len(self.token_ids), values.dtype)
        column[self.list_at] = values
        return column


def _begins(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of some pieces begins that lie one behind the other."""
    ends: NDArray[np.int64] = np.cumsum(lengths)
    return ends - lengths
