"""The secret that the nodes of one deployment share. Read once, in the process of a command."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from pdx.config.resolve import Settings
from pdx.errors import ConfigError

__all__ = ["require_secret", "shared_secret"]

_MIN_BYTES = 16
_HOW = "make one with: openssl rand -hex 32"


def shared_secret(settings: Settings) -> bytes | None:
    """The secret from --secret-file or PDX_SECRET; None: there is none.

    Raises:
        ConfigError: both are set, the file cannot be read, or the secret is easily guessed.
    """
    text, file = settings["secret"], settings["secret_file"]
    if text is not None and file is not None:
        raise ConfigError("--secret-file and PDX_SECRET are both set", hint="use one of them")
    if file is not None:
        try:
            text = Path(file).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the secret from {file}: {error}") from error
    if text is None:
        return None
    secret: bytes = text.strip().encode()
    if len(secret) < _MIN_BYTES:
        raise ConfigError(f"the secret has fewer than {_MIN_BYTES} characters", hint=_HOW)
    return secret


def require_secret(listener: socket.socket, secret: bytes | None) -> None:
    """Other hosts must not be served without one.

    Raises:
        ConfigError: they would be.
    """
    host = listener.getsockname()[0]
    if secret is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"without a shared secret any host could use a control port on {host}",
            hint=f"give this node and its decoders --secret-file ({_HOW}), or listen on 127.0.0.1",
        )
