"""Figures of benches as files: SVG by ourselves, PNG where the optional `cairosvg` is there."""

from __future__ import annotations

import os
from pathlib import Path

from pdx.errors import ConfigError, OutputError

__all__ = ["check_plot", "write_plot"]


def check_plot(file: Path | None) -> None:
    """Before minutes of measuring: can this file be drawn?

    Raises:
        ConfigError: it is neither, or what a PNG needs is missing.
        OutputError: this user may not write it.
    """
    if file is None:
        return
    if file.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"{file}: plots are .svg or .png", hint=f"{file.with_suffix('.svg')}")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise OutputError(f"cannot write {file}: permission denied")
    if file.suffix.lower() == ".png":
        try:
            import cairosvg  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
        except (ImportError, OSError) as error:  # OSError: its libcairo is missing
            raise ConfigError(
                f"{file}: a .png needs cairosvg: {str(error).splitlines()[0]}",
                hint=f"pip install cairosvg, or --plot {file.with_suffix('.svg')}",
            ) from error


def write_plot(file: Path, svg: str) -> None:
    """Write a checked file.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        if file.suffix.lower() == ".svg":
            file.write_text(svg, "utf-8")
            return
        import cairosvg

        cairosvg.svg2png(bytestring=svg.encode(), write_to=str(file), scale=2)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror or error}") from error
