"""Whether a node of some settings can serve a model, before anything is started. No torch, pure.

A start, ``--check`` and ``pdx inspect model`` ask here, so that they give the same answer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pdx.checkpoint.float8_split import check_float8_split
from pdx.checkpoint.kernel_limits import check_kernel_limits
from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.weight_sizes import rank_weight_bytes
from pdx.config.engine import EngineConfig, interprets_kernels, runs_kernels
from pdx.host.memory_room import MemoryNeed
from pdx.kv.geometry import ITEMSIZE, check_tp_size, kv_layout, num_pages_of

__all__ = ["NodePlan", "check_settings", "plan_node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What a node would take."""

    #: With every "auto" resolved.
    config: EngineConfig
    num_pages: int
    #: What a rank's weights take.
    weight_bytes: int
    kv_bytes: int

    def host_memory(self, num_nodes: int = 1) -> MemoryNeed | None:
        """What so many nodes need on one host; None: their memory is that of GPUs."""
        if self.config.device != "cpu":
            return None
        return MemoryNeed(
            num_nodes=num_nodes,
            num_ranks=self.config.tp_size,
            weight_bytes=self.weight_bytes,
            kv_bytes=self.kv_bytes,
        )


def check_settings(model: ModelConfig, config: EngineConfig) -> EngineConfig:
    """Whether ranks can be made; the settings with every "auto" resolved.

    Raises:
        ConfigError: the settings do not fit the model, or each other.
        CheckpointError: the device's kernels cannot run the model.
    """
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype=model.dtype)
    check_tp_size(model, config.tp_size)
    config.check_kv_type(interprets_kernels=interprets_kernels())
    if runs_kernels(config.device):
        check_kernel_limits(
            model,
            tp_size=config.tp_size,
            page_size=config.page_size,
            dtype=config.dtype,
            kv_dtype=config.kv_type,
        )
        check_float8_split(model, config.tp_size)
    return config


def plan_node(model: ModelConfig, config: EngineConfig) -> NodePlan:
    """What ranks take. Raises as :func:`check_settings` does, and where KV memory holds no page."""
    config = check_settings(model, config)
    page_size, kv_type, tp_size = config.page_size, config.kv_type, config.tp_size
    num_pages = num_pages_of(
        *(model, page_size, config.num_pages, config.kv_memory_bytes, kv_type, tp_size),
        drafts=config.drafts,
    )
    layout = kv_layout(model, page_size, num_pages, kv_type, tp_size, drafts=config.drafts)
    weight_bytes = rank_weight_bytes(
        model, tp_size, ITEMSIZE[config.dtype], keeps_float8=runs_kernels(config.device)
    )
    return NodePlan(
        config=config,
        num_pages=num_pages,
        weight_bytes=weight_bytes,
        kv_bytes=layout.total_bytes,
    )
