"""What an installation of pdx holds: its version and its native libraries. Any process.

The distribution has another name than the package: ``pdx`` on PyPI is somebody else's project.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

__all__ = ["native_library", "version"]

_DISTRIBUTION = "pdx-serve"
_PACKAGE = Path(__file__).parent


def version() -> str:
    """The installed version; "0.0.0" for a source tree that was never installed."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"


def native_library(path: str) -> Path:
    """Where the build has put a native library.

    Args:
        path: below the package, for instance ``fabric/native/libpdx_fabric.so``.
    """
    # An editable installation keeps Python files in the checkout and built ones in site-packages.
    try:
        distribution = importlib.metadata.distribution(_DISTRIBUTION)
        installed = Path(str(distribution.locate_file(f"pdx/{path}")))
        if installed.exists():
            return installed
    except importlib.metadata.PackageNotFoundError:
        pass
    return _PACKAGE / path
