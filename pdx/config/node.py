"""What a node needs besides its engine: its model, its peer, its API, its logs. Resolved once and
never changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdx.config.providers import FabricChoice
from pdx.config.setting import setting

__all__ = [
    "DrainConfig",
    "FabricConfig",
    "ModelChoice",
    "OutputConfig",
    "RecoveryConfig",
    "RestartConfig",
    "ServerConfig",
    "TraceConfig",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which model."""

    model: str | None = setting(
        None,
        "A Hugging Face folder, or org/name[@revision].",
        key="model",
        section="model",
        metavar="MODEL",
        short="-m",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricConfig:
    """How nodes find each other, and what carries the KV cache."""

    peers: tuple[str, ...] = setting(
        (),
        "Control address of a prefiller, as it printed it; give it again for more.",
        key="peer",
        section="fabric",
        metavar="HOST:PORT",
    )
    listen: str = setting(
        "127.0.0.1:0",
        "Control address for decoders: HOST:PORT, [IPV6]:PORT or :PORT; port 0 picks a free one.",
        key="listen",
        section="fabric",
        metavar="HOST:PORT",
    )
    fabric: str = setting(
        FabricChoice.AUTO,
        "libfabric provider; auto is shm on one host, else tcp.",
        key="fabric",
        section="fabric",
        choices=tuple(FabricChoice),
    )
    local_below: int = setting(
        0,
        "A decoder computes prompts of which fewer tokens than this are missing by itself.",
        key="local_below",
        section="scheduler",
        metavar="TOKENS",
        minimum=0,
    )
    fabric_bind: tuple[str, ...] = setting(
        (),
        "Address of a network card that carries the KV cache over tcp; give it again for more, to "
        "stripe over all.",
        key="fabric_bind",
        section="fabric",
        metavar="HOST",
        unset="the one towards the peer",
    )
    fabric_core: str = setting(
        "auto",
        "Core to pin the fabric's worker to, or none; auto takes the one that pdx inspect topology "
        "names, where ranks do not compute on the cores.",
        key="fabric_core",
        section="fabric",
        metavar="CORE",
    )
    secret_file: str | None = setting(
        None,
        "File with the secret that prefillers and decoders share; needed off loopback.",
        key="secret_file",
        section="fabric",
        metavar="FILE",
    )
    secret: str | None = setting(
        None,
        "The secret itself. Better set in the environment: other users of this host can read "
        "flags.",
        key="secret",
        section="fabric",
        metavar="SECRET",
        secret=True,
    )
    peer_timeout_s: float = setting(
        60.0,
        "How long to wait for a prefiller at the start.",
        key="peer_timeout",
        section="fabric",
        metavar="SECONDS",
        minimum=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """What a decoder does when prefillers fail."""

    local_fallback: bool = setting(
        True,
        "A decoder prefills prompts by itself while no prefiller is connected and well.",
        key="local_fallback",
        section="fabric",
    )
    prefill_retries: int = setting(
        2,
        "How many times a prompt is sent to a prefiller again after one has failed it.",
        key="prefill_retries",
        section="fabric",
        metavar="TIMES",
        minimum=0,
    )
    prefiller_wait_s: float = setting(
        10.0,
        "How long a request waits for a prefiller that is gone, without --local-fallback.",
        key="prefiller_wait",
        section="fabric",
        metavar="SECONDS",
        minimum=0,
    )
    breaker_rate: float = setting(
        0.5,
        "Share of its last 20 prompts that a prefiller must fail to be left alone; above 1: never.",
        key="breaker_rate",
        section="fabric",
        metavar="SHARE",
        minimum=0,
    )
    breaker_pause_s: float = setting(
        5.0,
        "How long it is left alone before one more prompt is tried there.",
        key="breaker_pause",
        section="fabric",
        metavar="SECONDS",
        minimum=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP API."""

    http: str = setting(
        "127.0.0.1:0",
        "Address of the HTTP API; port 0 picks a free one.",
        key="http",
        section="server",
        metavar="HOST:PORT",
    )
    served_model_name: str | None = setting(
        None,
        "The model's name in the API.",
        key="served_model_name",
        section="server",
        metavar="NAME",
        unset="the folder's or hub name",
    )
    api_key: str | None = setting(
        None,
        "Clients must send this key as a bearer token or x-api-key. Better set in the "
        "environment: other users of this host can read flags.",
        key="api_key",
        section="server",
        metavar="KEY",
        unset="anyone may ask",
        secret=True,
    )
    max_streams: int = setting(
        1024,
        "Streams at once, waiting ones included; more get a 503.",
        key="max_streams",
        section="server",
        metavar="STREAMS",
        minimum=1,
    )
    request_timeout_s: float = setting(
        3600.0,
        "Longest time for one HTTP request, first byte to last; 0 sets no limit.",
        key="request_timeout",
        section="server",
        metavar="SECONDS",
        minimum=0,
    )
    max_body_bytes: int = setting(
        16 << 20,
        "Longest request body.",
        key="max_body",
        section="server",
        metavar="SIZE",
        minimum=1,
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "A web origin whose scripts may use the API, * for all; give it again for more.",
        key="cors_origin",
        section="server",
        metavar="ORIGIN",
        unset="CORS is off",
    )
    ignore_unknown_fields: bool = setting(
        False,
        "Drop fields of requests that nobody knows, with one warning for each name; else they are "
        "refused.",
        key="ignore_unknown_fields",
        section="server",
    )
    header_timeout_s: float = setting(
        20.0,
        "Longest time for a request's header.",
        key="header_timeout",
        section="server",
        metavar="SECONDS",
        minimum=0.1,
    )
    body_timeout_s: float = setting(
        60.0,
        "Longest time for a request's body.",
        key="body_timeout",
        section="server",
        metavar="SECONDS",
        minimum=0.1,
    )
    keep_alive_s: float = setting(
        75.0,
        "How long an idle connection is kept for its next request.",
        key="keep_alive",
        section="server",
        metavar="SECONDS",
        minimum=0.1,
    )
    max_connections: int | None = setting(
        None,
        "HTTP connections at once. When all are taken, an idle one is closed for a new one.",
        key="max_connections",
        section="server",
        metavar="CONNECTIONS",
        minimum=1,
        unset="what the limit of open files leaves",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig:
    """How a node ends on SIGTERM."""

    drain_timeout_s: float = setting(
        60.0,
        "How long running requests may take to finish after SIGTERM; a second one ends them.",
        key="drain_timeout",
        section="server",
        metavar="SECONDS",
        minimum=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartConfig:
    """What `pdx serve` does about a node that ends."""

    restarts: int = setting(
        5,
        "How many times serve starts a node again that has ended, until it serves for five "
        "minutes; 0: serve ends with it.",
        key="restarts",
        section="server",
        metavar="TIMES",
        minimum=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """What is written down about requests and passes."""

    trace: str | None = setting(
        None,
        "Write a trace of requests, transfers and passes to this file, for Perfetto.",
        key="trace",
        section="output",
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """What is said on stderr."""

    log_level: str = setting(
        "warning",
        "The least severe messages to log.",
        key="log_level",
        section="output",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = setting(
        "text",
        "Form of what goes to stderr; json is one object a line.",
        key="log_format",
        section="output",
        choices=("text", "json"),
    )
    debug: bool = setting(False, "Show a traceback with an error.", key="debug", section="output")
