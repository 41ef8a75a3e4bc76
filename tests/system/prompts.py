"""Prompts of exact lengths for the tiny model."""

from __future__ import annotations

__all__ = ["prompt_of"]


def prompt_of(ids: list[int], length: int, shift: int = 0) -> list[int]:
    """A prompt of exactly this length; different shifts share no prefix."""
    body = (ids[1:] * 4)[shift : shift + length - 1]
    return [ids[0], *body]
