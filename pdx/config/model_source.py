"""From what a user calls a model to a folder on this disk. No torch; runs before a node starts."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pdx.config.model_files import weight_files
from pdx.errors import CheckpointError, ConfigError

__all__ = ["model_is_folder", "resolve_model"]

_HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_PATTERNS = ["*.json", "*.jinja", "model*.safetensors"]


def model_is_folder(name: str) -> bool:
    """Whether a user's name for a model is a folder on this host."""
    # An empty name would mean the working directory.
    return bool(name) and Path(name).expanduser().is_dir()


def resolve_model(name: str) -> Path:
    """A local folder as it is, or the folder of ``org/name[@revision]`` in the Hugging Face cache.

    What the cache lacks is downloaded, with huggingface_hub's progress bars on stderr.

    Raises:
        ConfigError: ``name`` is neither a folder nor a model's name.
        CheckpointError: the hub does not have it, or cannot be asked.
    """
    if model_is_folder(name):
        return Path(name).expanduser().resolve()
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"model {name!r} is neither a folder nor org/name[@revision]",
            hint="check the path; the hub's models are written like HuggingFaceTB/SmolLM2-135M",
        )
    repo, revision = match["repo"], match["revision"]
    return _cached(repo, revision) or _downloaded(repo, revision)


def _cached(repo: str, revision: str | None) -> Path | None:
    try:
        found = snapshot_download(
            repo, revision=revision, allow_patterns=_PATTERNS, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None
    folder = Path(found)
    # A download that was broken off leaves a folder too.
    try:
        weight_files(folder)
    except CheckpointError:
        return None
    return folder if (folder / "config.json").exists() else None


def _downloaded(repo: str, revision: str | None) -> Path:
    what = repo if revision is None else f"{repo}@{revision}"
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_PATTERNS))
    except GatedRepoError as error:
        raise CheckpointError(
            f"model {what} is gated on the hub", hint="accept its terms there, then set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"the hub has no model {what}", hint="check the name; a private one needs HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"model {repo} has no revision {revision!r} on the hub") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"model {what} is not in the local cache and cannot be downloaded: {reason}",
            hint="check the network (and HF_HUB_OFFLINE), or give a local folder",
        ) from error
