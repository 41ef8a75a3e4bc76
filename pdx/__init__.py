"""pdx: disaggregated LLM inference. Prefill on one node, decode on another, the KV cache written
over libfabric.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdx.llm import LLM, Generation, SamplingParams

__version__: str

__all__ = ["LLM", "Generation", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Everything is looked up when it is asked for: a help page needs none of it."""
    if name == "__version__":
        from pdx.installed import version

        return version()
    if name in __all__:
        from pdx import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
