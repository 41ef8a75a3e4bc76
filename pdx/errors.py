"""Every error that pdx raises on purpose. Imported by all packages; imports none of them.

PdxError
├── ConfigError            a flag, a file or the environment is wrong              400  exit 2
│   └── OutputError        stdout or a file that was asked for cannot be written  400  exit 1
├── CheckpointError        a model folder cannot be served as it is               500  exit 1
├── RequestError           one request failed, the node goes on
│   ├── InvalidRequest     the client's input                                     400
│   ├── UnknownModel       the model's name                                       404
│   ├── CapacityError      no room now, or a queue limit                          503
│   └── TransferFailed     the KV cache did not arrive                            503
├── FabricError            libfabric refused or failed                            503  exit 1
├── PeerError              another node
│   ├── ProtocolError      it sent what the protocol does not allow               502  exit 1
│   ├── PeerRefused        it refused the handshake, with its reason              502  exit 1
│   └── PeerLost           its control link or its data path ended                503  exit 1
│       └── NoDataPath     pages cannot go between its data address and ours      503  exit 1
├── WorkerError            a rank or the frontend process died                    503  exit 1
│   └── SiblingLost        a rank cannot reach another one, which has the cause   503  exit 1
└── InternalError          an invariant of ours is broken                         500  exit 70
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "FabricError",
    "InternalError",
    "InvalidRequest",
    "NoDataPath",
    "OutputError",
    "PdxError",
    "PeerError",
    "PeerLost",
    "PeerRefused",
    "ProtocolError",
    "RequestError",
    "SiblingLost",
    "TransferFailed",
    "UnknownModel",
    "WorkerError",
    "error_from_report",
]


class PdxError(Exception):
    """Base of all. ``hint`` says what to do; ``http_status`` and ``exit_code`` are what the edges
    answer with.
    """

    http_status: int = 500
    exit_code: int = 1
    #: The ``type`` of an OpenAI-shaped error body.
    kind: str = "internal_error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(PdxError):
    """A flag, a configuration file or the environment is wrong."""

    http_status = 400
    exit_code = 2
    kind = "config_error"


class OutputError(ConfigError):
    """stdout, or a file that the user asked for, cannot be written."""

    exit_code = 1


class CheckpointError(PdxError):
    """A model folder is damaged, incomplete or of a kind that pdx does not serve."""

    kind = "checkpoint_error"


class RequestError(PdxError):
    """One request failed; nothing else did. ``param`` names the offending field, where there is
    one.
    """

    kind = "request_error"

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class InvalidRequest(RequestError):
    """The client's input is wrong, or can never be served."""

    http_status = 400
    kind = "invalid_request_error"


class UnknownModel(RequestError):
    """The request names a model that this node does not serve."""

    http_status = 404
    kind = "not_found_error"


class CapacityError(RequestError):
    """No room now: a queue or a pool is full, or no prefiller is connected."""

    http_status = 503
    kind = "overloaded_error"


class TransferFailed(RequestError):
    """The KV cache of the request was not proved to be here."""

    http_status = 503
    kind = "transfer_failed"


class FabricError(PdxError):
    """libfabric refused or failed. ``code`` is its (positive) error number, where there is one."""

    http_status = 503
    kind = "fabric_error"

    def __init__(self, message: str, *, hint: str | None = None, code: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class PeerError(PdxError):
    """Another node is at fault. ``peer`` is its control address."""

    http_status = 502
    kind = "peer_error"

    def __init__(self, message: str, *, hint: str | None = None, peer: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.peer = peer


class ProtocolError(PeerError):
    """A peer sent what the protocol does not allow; its link is closed."""


class PeerRefused(PeerError):
    """A peer refused the handshake; the message carries its reason."""


class PeerLost(PeerError):
    """A peer's control link or data path ended."""

    http_status = 503


class NoDataPath(PeerLost):
    """No write got through between the data addresses of two nodes whose control link is up."""


class WorkerError(PdxError):
    """A process of this node (a rank, the frontend) died or hangs; the node stops."""

    http_status = 503
    kind = "worker_error"


class SiblingLost(WorkerError):
    """A rank cannot reach another rank of its node: that one has failed, and why is its to say."""


class InternalError(PdxError):
    """An invariant of ours is broken; the node stops."""

    exit_code = 70


def error_from_report(kind: str, message: str) -> PdxError:
    """The error that another process of this node reported by class name; WorkerError for an
    unknown name.
    """
    error_class = globals().get(kind)
    if isinstance(error_class, type) and issubclass(error_class, PdxError):
        return error_class(message)
    return WorkerError(f"{kind}: {message}")
