"""pdx: disaggregated LLM inference. Prefill on one node, decode on another, the KV cache written
over libfabric.
"""

__version__: str

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """The version, looked up when it is asked for: the look-up takes as long as half of a help
    page.
    """
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pdx.installed import version

    return version()
