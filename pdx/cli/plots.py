"""Figures of benches as files: SVG by ourselves, PNG where the optional `cairosvg` is there."""

from __future__ import annotations

from pathlib import Path

from pdx.errors import ConfigError

__all__ = ["check_plot", "write_plot"]


def check_plot(file: Path | None) -> None:
    """Before minutes of measuring: can this file be drawn?

    Raises:
        ConfigError: it is neither, or what a PNG needs is missing.
    """
    if file is None:
        return
    if file.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"{file}: plots are .svg or .png", hint=f"{file.with_suffix('.svg')}")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}")
    if file.suffix.lower() == ".png":
        try:
            import cairosvg  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
        except (ImportError, OSError) as error:  # OSError: its libcairo is missing
            raise ConfigError(
                f"{file}: a .png needs cairosvg: {str(error).splitlines()[0]}",
                hint=f"pip install cairosvg, or --plot {file.with_suffix('.svg')}",
            ) from error


def write_plot(file: Path, svg: str) -> None:
    """Write a checked file."""
    if file.suffix.lower() == ".svg":
        file.write_text(svg, "utf-8")
        return
    import cairosvg

    cairosvg.svg2png(bytestring=svg.encode(), write_to=str(file), scale=2)
