"""From what a user calls a model to a folder on this disk. No torch; runs before a node starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import get_safetensors_metadata, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)

from pdx.checkpoint.model_files import weight_files
from pdx.checkpoint.weight_headers import StoredTensor, read_weight_headers
from pdx.errors import CheckpointError, ConfigError

__all__ = ["describe_weights", "model_is_folder", "resolve_description", "resolve_model"]

_HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_TEXTS = ["*.json", "*.jinja"]
_ALL = [*_TEXTS, "model*.safetensors"]


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
    return _local(name) or _downloaded(*_split(name), _ALL)


def resolve_description(name: str) -> Path:
    """A model's folder, of which only the small files need be there.

    Raises:
        ConfigError: ``name`` is neither a folder nor a model's name.
        CheckpointError: the hub does not have it, or cannot be asked.
    """
    return _local(name) or _downloaded(*_split(name), _TEXTS)


def describe_weights(name: str) -> tuple[Path, dict[str, StoredTensor]]:
    """A model's folder and what its weight files hold; weights themselves are not downloaded.

    Of a model that is not on this disk, the folder gets the small files, and the hub is asked for
    the headers of the weights.

    Raises:
        ConfigError: ``name`` is neither a folder nor a model's name.
        CheckpointError: the hub does not have it, or cannot be asked, or a file is damaged.
    """
    if (folder := _local(name)) is not None:
        return folder, read_weight_headers(folder)
    repo, revision = _split(name)
    folder = _downloaded(repo, revision, _TEXTS)
    with _hub_errors(repo, revision):
        files = get_safetensors_metadata(repo, revision=revision).files_metadata
    return folder, {
        tensor: StoredTensor(path=folder / file, shape=tuple(info.shape), dtype=info.dtype)
        for file, metadata in files.items()
        for tensor, info in metadata.tensors.items()
    }


def _local(name: str) -> Path | None:
    """Where the whole model is on this disk."""
    if model_is_folder(name):
        return Path(name).expanduser().resolve()
    return _cached(*_split(name))


def _split(name: str) -> tuple[str, str | None]:
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"model {name!r} is neither a folder nor org/name[@revision]",
            hint="check the path; the hub's models are written like HuggingFaceTB/SmolLM2-135M",
        )
    return match["repo"], match["revision"]


def _cached(repo: str, revision: str | None) -> Path | None:
    try:
        found = snapshot_download(
            repo, revision=revision, allow_patterns=_ALL, local_files_only=True
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


def _downloaded(repo: str, revision: str | None, patterns: list[str]) -> Path:
    with _hub_errors(repo, revision):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    what = repo if revision is None else f"{repo}@{revision}"
    try:
        yield
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
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise CheckpointError(
            f"the hub has no readable safetensors weights of {what}: {error}",
            hint="pdx reads safetensors weights only",
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"model {what} is not in the local cache and cannot be downloaded: {reason}",
            hint="check the network (and HF_HUB_OFFLINE), or give a local folder",
        ) from error
