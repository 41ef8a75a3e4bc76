"""The experts of a sparse layer, each of which is split over the ranks like any other MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pdx.checkpoint.experts import ExpertsConfig
from pdx.kernels.ops import Ops
from pdx.models.sharding import TpGroup, even_shard
from pdx.models.stored import StoredPart

__all__ = ["Experts"]


class Experts(nn.Module):
    """E SwiGLU MLPs in two tensors; this rank has a part of each one's inner size.

    On disk they are a tensor for each expert and projection, as published, or two tensors of all of
    them, as models are kept in memory elsewhere.
    """

    #: Parameters that may stay in float8; a loader that keeps one fills in its scales.
    float8 = ("gate_up_proj", "down_proj")
    gate_up_proj_scale_inv: nn.Parameter | None
    down_proj_scale_inv: nn.Parameter | None

    def __init__(self, hidden_size: int, config: ExpertsConfig, ops: Ops, tp: TpGroup) -> None:
        super().__init__()
        self._ops = ops
        self._config = config
        self._part = part = even_shard(config.inner_size, tp)
        num = config.num_experts
        self.gate_up_proj = nn.Parameter(
            torch.empty(num, 2 * part.size, hidden_size), requires_grad=False
        )
        self.down_proj = nn.Parameter(torch.empty(num, hidden_size, part.size), requires_grad=False)
        for name in self.float8:
            self.register_parameter(f"{name}_scale_inv", None)

    @property
    def stored(self) -> dict[str, tuple[tuple[StoredPart, ...], ...]]:
        """The weight table, tens of thousands of parts in a large model: made when it is read."""
        num, whole, part = self._config.num_experts, self._config.inner_size, self._part
        hidden_size = self.down_proj.shape[1]
        ours, every = slice(part.start, part.stop), slice(None)
        gate, up = slice(0, part.size), slice(part.size, 2 * part.size)
        up_ours = slice(whole + part.start, whole + part.stop)
        fused_up, fused_down = (num, 2 * whole, hidden_size), (num, hidden_size, whole)
        one_up, one_down = (whole, hidden_size), (hidden_size, whole)
        return {
            "gate_up_proj": (
                tuple(
                    StoredPart(f"{expert}.{name}.weight", one_up, (ours,), (expert, place))
                    for expert in range(num)
                    for name, place in (("gate_proj", gate), ("up_proj", up))
                ),
                (
                    StoredPart("gate_up_proj", fused_up, (every, ours), (every, gate)),
                    StoredPart("gate_up_proj", fused_up, (every, up_ours), (every, up)),
                ),
            ),
            "down_proj": (
                tuple(
                    StoredPart(f"{expert}.down_proj.weight", one_down, (every, ours), (expert,))
                    for expert in range(num)
                ),
                (StoredPart("down_proj", fused_down, (every, every, ours), ()),),
            ),
        }

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, H], weights and ids [T, K] -> this rank's share of the sum [T, H]."""
        return self._ops.expert_mlp(
            *(x, weights, ids, self.gate_up_proj, self.down_proj),
            *(self.gate_up_proj_scale_inv, self.down_proj_scale_inv),
        )
