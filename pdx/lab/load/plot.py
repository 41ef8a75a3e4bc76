"""Distributions of times as an SVG, written by hand: three curves need no plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

__all__ = ["distribution_svg"]

_PANELS = {"ttft_s": "time to first token", "itl_s": "between two events", "e2e_s": "request"}
_COLOURS = ("#1f77b4", "#d62728")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BETWEEN = 300, 200, 50, 40, 40
#: Points of a curve at most.
_MAX_POINTS = 200


def distribution_svg(urls: Sequence[str], times: Sequence[Mapping[str, Sequence[float]]]) -> str:
    """Shares of requests (of events) that took at most so long, on a logarithmic axis.

    Args:
        times: for each server, seconds by figure (``ttft_s``, ``itl_s``, ``e2e_s``).
    """
    width = _LEFT + len(_PANELS) * (_WIDTH + _BETWEEN)
    height = _TOP + _HEIGHT + 50 + 18 * len(urls)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, (name, title) in enumerate(_PANELS.items()):
        parts += _panel(_LEFT + i * (_WIDTH + _BETWEEN), title, [each[name] for each in times])
    for i, url in enumerate(urls):
        y = _TOP + _HEIGHT + 54 + 18 * i
        parts.append(f'<rect x="{_LEFT}" y="{y - 9}" width="18" height="4" fill="{_COLOURS[i]}"/>')
        parts.append(f'<text x="{_LEFT + 26}" y="{y}">{escape(url)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(left: float, title: str, curves: Sequence[Sequence[float]]) -> list[str]:
    values = [value for curve in curves for value in curve if value > 0]
    parts = [
        f'<text x="{left + _WIDTH / 2}" y="{_TOP - 14}" text-anchor="middle">{title}</text>',
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#888"/>',
    ]
    if not values:
        return parts
    low = math.floor(math.log10(min(values)))
    high = max(math.ceil(math.log10(max(values))), low + 1)

    def x_of(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * _WIDTH

    for power in range(low, high + 1):
        x = x_of(10.0**power)
        parts.append(_line(x, _TOP, x, _TOP + _HEIGHT))
        label = f"{10.0**power * 1e3:g} ms" if power < 0 else f"{10.0**power:g} s"
        parts.append(
            f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{label}</text>'
        )
    for share in (0.0, 0.5, 0.9, 1.0):
        y = _TOP + (1 - share) * _HEIGHT
        parts.append(_line(left, y, left + _WIDTH, y))
        parts.append(f'<text x="{left - 5}" y="{y + 4}" text-anchor="end">{share * 100:g}%</text>')
    for curve, colour in zip(curves, _COLOURS, strict=False):
        ordered = sorted(value for value in curve if value > 0)
        step = max(1, len(ordered) // _MAX_POINTS)
        places = sorted({*range(0, len(ordered), step), len(ordered) - 1} if ordered else ())
        points = " ".join(
            f"{x_of(ordered[i]):.1f},{_TOP + (1 - (i + 1) / len(ordered)) * _HEIGHT:.1f}"
            for i in places
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
    return parts


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'
