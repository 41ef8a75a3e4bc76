"""pdx: disaggregated LLM inference. Prefill on one node, decode on another, the KV cache written
over libfabric.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("pdx")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["__version__"]
