"""The control link's messages: one tagged msgpack family, one TCP connection per decoder-prefiller
pair.

    decoder                                prefiller
    Describe                 ------------> Description        (a connection of its own; optional)
    Hello                    ------------> Welcome | Refuse
      (where they share a secret: Challenge <-> Proof comes in between, see authentication.py)
    Prefill                  ------------> Reject | PrefixFound | PromptLogprobs | Sealed | Posted
                                           | Failed
    Cancel                   ------------> Drained
                             <------------ Draining
    Goodbye                  <-----------> Goodbye

The KV cache itself never travels here. ``transfer_id`` is made by the decoder, unique over its
life; the ids that clients know a request by travel only for log lines.
"""

from __future__ import annotations

import msgspec

from pdx.messenger.manifest import Manifest
from pdx.metrics.faults import Fault
from pdx.request.batch import ScoredToken
from pdx.request.ids import IdArray
from pdx.request.names import RequestNames

__all__ = [
    "MAX_CONTROL_FRAME_BYTES",
    "MAX_OPENING_FRAME_BYTES",
    "PROTOCOL_VERSION",
    "Cancel",
    "Challenge",
    "ChunkTimes",
    "ControlMessage",
    "Describe",
    "Description",
    "Drained",
    "Draining",
    "Failed",
    "Goodbye",
    "Hello",
    "Posted",
    "Prefill",
    "PrefixFound",
    "PromptLogprobs",
    "Proof",
    "Refuse",
    "Reject",
    "Sealed",
    "Welcome",
]

PROTOCOL_VERSION = 7
#: A prompt of a million tokens is 4 MB.
MAX_CONTROL_FRAME_BYTES = 32 << 20
#: Until a peer is known: manifests and descriptors are a few kilobytes.
MAX_OPENING_FRAME_BYTES = 256 << 10


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag="describe"):
    """Ask what a prefiller serves, before loading anything."""

    protocol: int = PROTOCOL_VERSION
    nonce: bytes = b""


class Description(msgspec.Struct, frozen=True, kw_only=True, tag="description"):
    """The model as the prefiller was told it: a folder on its host, or ``org/name[@revision]``."""

    model: str
    #: The checkpoint's dtype as served.
    dtype: str
    page_size: int
    #: See authentication.py.
    mac: bytes = b""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A decoder opens a link."""

    protocol: int
    #: Random identity of the decoder process; a new link of the same node ends the old one first.
    node: str
    manifest: Manifest
    #: Identity of the host as far as shared memory reaches (boot, PID namespace, /dev/shm).
    host: str
    pid: int
    #: Fabric descriptors by provider, in the decoder's order of preference.
    descriptors: list[tuple[str, bytes]]
    nonce: bytes = b""


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag="challenge"):
    """The prefiller has a secret: prove that you have it."""

    nonce: bytes


class Proof(msgspec.Struct, frozen=True, kw_only=True, tag="proof"):
    """The decoder's answer to a challenge."""

    mac: bytes


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The link is accepted; the data path is probed next."""

    node: str
    manifest: Manifest
    host: str
    pid: int
    provider: str
    descriptor: bytes
    #: Longest prompt that fits the prefiller's pages, tokens.
    max_prompt_len: int
    #: See authentication.py.
    mac: bytes = b""


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """The link is refused."""

    reason: str
    #: False: only now, so that the decoder may try again.
    for_good: bool = True


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """Compute a prompt and write its KV into the decoder's pages."""

    transfer_id: int
    #: The prompt without its last token.
    token_ids: IdArray
    #: First token position whose KV is wanted; a multiple of the decoder's page size.
    first_position: int
    #: The decoder's pages for positions ``first_position`` onwards, in order.
    page_indices: IdArray
    slot: int
    generation: int
    #: Atoms for each of the decoder's ranks. A prefiller whose plan gives other numbers rejects.
    atoms_by_rank: list[int]
    #: Score the prompt's tokens, with this many of the most likely ones; None: do not.
    prompt_logprobs: int | None = None
    #: The prompt's last token, where the prompt is scored.
    last_token_id: int | None = None
    #: Only requests with the same one share pages of the prefix cache.
    cache_salt: str = ""
    #: The ids by which clients know the request, for log lines.
    names: RequestNames = RequestNames()

    @property
    def atoms(self) -> int:
        """What the decoder will count."""
        return sum(self.atoms_by_rank)


class Reject(msgspec.Struct, frozen=True, kw_only=True, tag="reject"):
    """Nothing was and nothing will be written for this transfer. Fields as of PdxError."""

    transfer_id: int
    http_status: int
    kind: str
    message: str


class PrefixFound(msgspec.Struct, frozen=True, kw_only=True, tag="prefix_found"):
    """The prefill begins, and the prefiller need not compute the first tokens. Sent where there are
    any.
    """

    transfer_id: int
    num_tokens: int


class Sealed(msgspec.Struct, frozen=True, kw_only=True, tag="sealed"):
    """The prompt has been computed, and some of its writes are not complete yet. No sign of
    readiness: from now on atoms must come in.
    """

    transfer_id: int


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True, tag="prompt_logprobs"):
    """Scores of prompt tokens from ``first_position`` on; ``last`` with the final ones."""

    transfer_id: int
    first_position: int
    tokens: list[ScoredToken]
    last: bool


class ChunkTimes(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One chunk of a prompt; times as in Posted."""

    end_position: int
    start_ns: int
    #: 0: its pass has not been taken in yet.
    end_ns: int = 0


class Posted(msgspec.Struct, frozen=True, kw_only=True, tag="posted"):
    """All writes of a transfer are complete on the prefiller's side. Never a sign of readiness."""

    transfer_id: int
    atoms: int
    #: CLOCK_MONOTONIC of the prefiller's host, ns.
    prefill_start_ns: int
    last_layer_ns: int
    #: The last completion was in; 0: not told.
    posted_ns: int = 0
    chunks: list[ChunkTimes] = []


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Stop a transfer; always answered by Drained."""

    transfer_id: int


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag="drained"):
    """Nothing more will be posted; ``atoms`` were, ``failed`` of them with an error."""

    transfer_id: int
    atoms: int
    failed: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The transfer failed on the prefiller's side; otherwise as Drained."""

    transfer_id: int
    atoms: int
    failed: int
    reason: str


class Draining(msgspec.Struct, frozen=True, kw_only=True, tag="draining"):
    """The prefiller takes no new prompts; the decoder says Goodbye when it has what it asked
    for.
    """


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """This side ends the link: on purpose, or for a fault that it has found."""

    reason: str
    #: What this side counts, so that the other one counts the same; None: no fault.
    fault: Fault | None = None
    #: No write got through at the start, and trying again would not help.
    no_data_path: bool = False


ControlMessage = (
    Describe
    | Description
    | Hello
    | Challenge
    | Proof
    | Welcome
    | Refuse
    | Prefill
    | Reject
    | PrefixFound
    | Sealed
    | PromptLogprobs
    | Posted
    | Cancel
    | Drained
    | Failed
    | Draining
    | Goodbye
)
