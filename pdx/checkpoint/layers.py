"""Groups of a model's layers, by what of a request's KV cache they keep."""

from __future__ import annotations

import msgspec

__all__ = ["FULL_ATTENTION", "LayerGroup", "full_attention"]

#: The group of the layers that keep every position, by the name that config.json has for the kind.
FULL_ATTENTION = "full_attention"


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep the same positions of a request, and so share its pages.

    A page belongs to one group and holds all of the group's layers. All models that are served have
    one group; layers with a sliding window, or with a recurrent state, would be others, with pools,
    page tables and prefix keys of their own. A layer's index is the model's everywhere, also in a
    progress word.
    """

    name: str
    #: Indices in the model, rising.
    layers: tuple[int, ...]


def full_attention(num_layers: int) -> LayerGroup:
    """So many layers, all of which keep every position."""
    return LayerGroup(name=FULL_ATTENTION, layers=tuple(range(num_layers)))
