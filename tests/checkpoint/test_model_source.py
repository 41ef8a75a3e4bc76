"""resolve_model: folders, the cache, and what cannot be had. Nothing here asks a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo

from pdx.checkpoint import model_source
from pdx.checkpoint.model_source import describe_weights, resolve_model
from pdx.checkpoint.weight_headers import StoredTensor
from pdx.errors import CheckpointError, ConfigError


class Hub:
    """Stands where huggingface_hub's download is called; records how."""

    def __init__(self, cached: Path | None, remote: Path | Exception) -> None:
        self.cached, self.remote = cached, remote
        self.calls: list[tuple[str, str | None, bool]] = []
        self.patterns: list[list[str]] = []

    def snapshot_download(
        self,
        repo: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        local_files_only: bool = False,
    ) -> str:
        self.calls.append((repo, revision, local_files_only))
        self.patterns.append(allow_patterns)
        answer = self.cached if local_files_only else self.remote
        if answer is None:
            raise LocalEntryNotFoundError("not in the cache")
        if isinstance(answer, Exception):
            raise answer
        return str(answer)


def install(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    monkeypatch.setattr(model_source, "snapshot_download", hub.snapshot_download)
    return hub


def hub_error(kind: type[Exception]) -> Exception:
    # Their constructors want an HTTP response; only the type matters here.
    error = kind.__new__(kind)
    Exception.__init__(error, "refused")
    return error


def test_folder_is_used_as_it_is(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = install(monkeypatch, Hub(None, RuntimeError("must not be asked")))
    assert resolve_model(str(tiny_llama)) == tiny_llama.resolve()
    monkeypatch.chdir(tiny_llama.parent)
    assert resolve_model(tiny_llama.name) == tiny_llama.resolve()
    assert hub.calls == []


def test_cached_model_is_used_without_the_network(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = install(monkeypatch, Hub(tiny_llama, RuntimeError("must not be asked")))
    assert resolve_model("org/name@v1.0") == tiny_llama
    assert hub.calls == [("org/name", "v1.0", True)]


def test_model_not_in_the_cache_is_downloaded(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = install(monkeypatch, Hub(None, tiny_llama))
    assert resolve_model("org/name") == tiny_llama
    assert hub.calls == [("org/name", None, True), ("org/name", None, False)]


def test_half_downloaded_model_is_completed(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    install(monkeypatch, Hub(tmp_path, tiny_llama))
    assert resolve_model("org/name") == tiny_llama


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (hub_error(RepositoryNotFoundError), "no model org/name@main"),
        (hub_error(RevisionNotFoundError), "no revision 'main'"),
        (hub_error(GatedRepoError), "gated"),
        (LocalEntryNotFoundError("no connection"), "no connection"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_download_failure_says_which_model_and_what_to_do(
    error: Exception, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Hub(None, error))
    with pytest.raises(CheckpointError, match=named) as caught:
        resolve_model("org/name@main")
    assert "org/name" in caught.value.message


def test_weights_of_a_model_on_the_hub_are_described_without_downloading_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = install(monkeypatch, Hub(None, tmp_path))
    tensors = {"norm.weight": TensorInfo(dtype="BF16", shape=[64], data_offsets=(0, 128))}
    file = SafetensorsFileMetadata(metadata={}, tensors=tensors)

    def metadata(repo: str, *, revision: str | None) -> SafetensorsRepoMetadata:
        assert (repo, revision) == ("org/name", "v2")
        return SafetensorsRepoMetadata(
            metadata=None, sharded=False, weight_map={}, files_metadata={"a.safetensors": file}
        )

    monkeypatch.setattr(model_source, "get_safetensors_metadata", metadata)
    assert describe_weights("org/name@v2") == (
        tmp_path,
        {"norm.weight": StoredTensor(path=tmp_path / "a.safetensors", shape=(64,), dtype="BF16")},
    )
    assert hub.patterns[-1] == ["*.json", "*.jinja"]


def test_local_weights_are_described_without_the_hub(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = install(monkeypatch, Hub(tiny_llama, RuntimeError("must not be asked")))
    assert describe_weights(str(tiny_llama))[1] == describe_weights("org/name")[1]
    assert all(local for _, _, local in hub.calls)


def test_hub_without_safetensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Hub(None, tmp_path))

    def metadata(repo: str, *, revision: str | None) -> SafetensorsRepoMetadata:
        raise NotASafetensorsRepoError(f"{repo} has none")

    monkeypatch.setattr(model_source, "get_safetensors_metadata", metadata)
    with pytest.raises(CheckpointError, match="org/name has none"):
        describe_weights("org/name")


@pytest.mark.parametrize(
    "name", ["", "nowhere", "/no/such/folder", "a/b/c", "org/", "../x", "o/n@"]
)
def test_neither_folder_nor_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Hub(None, RuntimeError("must not be asked")))
    with pytest.raises(ConfigError, match="neither"):
        resolve_model(name)


def test_config_side_imports_no_torch() -> None:
    code = (
        "import sys; import pdx.checkpoint.model, pdx.checkpoint.model_files; "
        "import pdx.checkpoint.model_source, pdx.kv.geometry; sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
