"""Throughput over page size as an SVG, written by hand. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from pdx.lab.transfers.figures import Figure

__all__ = ["size_text", "throughput_svg"]

_COLOURS = ("#d62728", "#7f7f7f", "#1f77b4", "#17becf", "#2ca02c", "#98df8a", "#9467bd")
_WIDTH, _HEIGHT, _LEFT, _TOP, _LINE = 560, 320, 70, 40, 18


def size_text(num_bytes: int) -> str:
    """4 KiB, 1 MiB; bytes where it is neither."""
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << shift and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift} {unit}"
    return f"{num_bytes} B"


def throughput_svg(figures: Sequence[Figure], title: str) -> str:
    """A curve of medians for each system with its interval, both axes logarithmic."""
    systems = sorted({each.system for each in figures}, key=lambda name: (name != "pdx", name))
    sizes = sorted({each.page_bytes for each in figures})
    low = 10 ** math.floor(math.log10(min(each.gb_per_s.low for each in figures)))
    high = 10 ** math.ceil(math.log10(max(each.gb_per_s.high for each in figures)))
    high = max(high, low * 10)
    height = _TOP + _HEIGHT + 60 + _LINE * len(systems)

    def x_of(size: int) -> float:
        span = math.log2(sizes[-1] / sizes[0]) or 1
        return _LEFT + math.log2(size / sizes[0]) / span * _WIDTH

    def y_of(rate: float) -> float:
        return _TOP + (1 - math.log(rate / low) / math.log(high / low)) * _HEIGHT

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 40}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="12" y="{_TOP - 6}">GB/s</text>',
    ]
    for rate in _ticks(low, high):
        parts.append(_grid(_LEFT, y_of(rate), _LEFT + _WIDTH, y_of(rate)))
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y_of(rate) + 4:.1f}" text-anchor="end">{rate:g}</text>'
        )
    for size in sizes:
        parts.append(_grid(x_of(size), _TOP, x_of(size), _TOP + _HEIGHT))
        parts.append(
            f'<text x="{x_of(size):.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">'
            f"{size_text(size)}</text>"
        )
    for i, system in enumerate(systems):
        colour = _COLOURS[i % len(_COLOURS)]
        mine = sorted((f for f in figures if f.system == system), key=lambda f: f.page_bytes)
        points = " ".join(f"{x_of(f.page_bytes):.1f},{y_of(f.gb_per_s.median):.1f}" for f in mine)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        for f in mine:
            x = x_of(f.page_bytes)
            top, bottom = y_of(f.gb_per_s.high), y_of(f.gb_per_s.low)
            parts.append(
                f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" '
                f'stroke="{colour}" stroke-opacity="0.5" stroke-width="4"/>'
            )
            # A line of one size, or an interval of one round, would not be seen.
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y_of(f.gb_per_s.median):.1f}" r="3" fill="{colour}"/>'
            )
        y = _TOP + _HEIGHT + 50 + _LINE * i
        parts.append(f'<rect x="{_LEFT}" y="{y - 7}" width="18" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + 26}" y="{y}">{escape(system)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _ticks(low: float, high: float) -> list[float]:
    decades = round(math.log10(high / low))
    return [low * 10**d * step for d in range(decades) for step in (1, 2, 5)] + [high]


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'
