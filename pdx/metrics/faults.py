"""The reasons by which a node counts faults. One fault has one reason, and each node that notices
it counts it once. What moves for which fault: docs/faults.md.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

__all__ = ["Fault", "fault_counts"]


class Fault(enum.StrEnum):
    """Why something failed. The value is the label of ``pdx_faults_total``.

    The first ones end a link. The node that finds such a fault says it in its Goodbye, and the
    other one counts the same.
    """

    #: The control connection broke: the other node was killed, or the connection was reset.
    CONNECTION_LOST = "connection_lost"
    #: The other node does not read its control messages.
    CONTROL_UNREAD = "control_unread"
    #: The other node has ended with an error of its own, and said so.
    PEER_FAILED = "peer_failed"
    #: The data path is silent: the other node is stopped, or the network is cut.
    NO_BEAT = "no_beat"
    #: An operation on the data path failed, and the other node lives.
    DATA_PATH = "data_path"
    #: The data path of a new link could not be made.
    NO_DATA_PATH = "no_data_path"
    #: All atoms were counted, and the fabric's worker did not say so.
    LOST_COMPLETION = "lost_completion"
    #: The prefiller's writes were complete on its side, and not all of them arrived.
    LOST_WRITES = "lost_writes"
    #: The prompt was computed, and its writes stopped coming.
    STALLED_WRITES = "stalled_writes"
    #: A cancel was not answered.
    CANCEL_UNANSWERED = "cancel_unanswered"
    #: The KV cache came, and the prefiller never said that it was done.
    NO_LAST_WORD = "no_last_word"
    #: The scores of a prompt did not come.
    NO_SCORES = "no_scores"
    #: The other node broke the protocol.
    PROTOCOL = "protocol"
    #: The prefiller would not take a prompt; the link goes on, as after the next one.
    PROMPT_REJECTED = "prompt_rejected"
    #: The prefiller could not post all writes of a prompt.
    POST_FAILED = "post_failed"
    #: A connection to the control port was no decoder's, or ended before it was a link.
    BAD_CONNECTION = "bad_connection"


def fault_counts(faults: Mapping[Fault, int]) -> dict[str, int]:
    """The counts by name. All reasons are there, so that each is 0 before it is 1."""
    return {f"faults_{fault}": faults.get(fault, 0) for fault in Fault}
