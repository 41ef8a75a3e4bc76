"""The sparse layers of a model, as its config.json gives them. No torch; any process.

A sparse layer has many MLPs (experts) and a router that picks a few of them for each token. The
routers' formulas are in ``pdx.kernels.reference.routing``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pdx.config.model_fields import Fields

__all__ = ["ExpertsConfig", "Routing", "SoftmaxRouting", "parse_qwen3_experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxRouting:
    """The most likely experts; their probabilities weigh their outputs."""

    #: Whether the weights of a token's experts are made to sum to 1.
    renormalise: bool


Routing: TypeAlias = SoftmaxRouting


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Which layers are sparse, and what is in them."""

    #: Sparse layers by index; the others have one MLP of the model's ``intermediate_size``.
    layers: frozenset[int]
    num_experts: int
    #: Experts of one token.
    num_chosen: int
    #: Inner size of an expert's MLP.
    inner_size: int
    routing: Routing


def parse_qwen3_experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    """Qwen3-MoE's fields; None: every layer is dense.

    Raises:
        CheckpointError: a number is missing or not served; it is named.
    """
    # transformers 5 writes the other name.
    num_experts = fields.size("num_experts", fields.take("num_local_experts", int, None) or ...)
    step = fields.size("decoder_sparse_step", 1)
    dense = fields.take("mlp_only_layers", list, [])
    if any(type(i) is not int or not 0 <= i < num_layers for i in dense):
        raise fields.refused("mlp_only_layers", dense)
    fields.require("shared_expert_intermediate_size", 0)
    fields.drop("output_router_logits", "router_aux_loss_coef")  # of training
    experts = ExpertsConfig(
        layers=frozenset(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense),
        num_experts=num_experts,
        num_chosen=num_chosen(fields, num_experts),
        inner_size=fields.size("moe_intermediate_size"),
        routing=SoftmaxRouting(renormalise=fields.take("norm_topk_prob", bool, False)),
    )
    return experts if experts.layers else None


def num_chosen(fields: Fields, num_experts: int) -> int:
    """``num_experts_per_tok``, which must be there and not be more than there are."""
    chosen = fields.size("num_experts_per_tok")
    if chosen > num_experts:
        raise fields.refused("num_experts_per_tok", chosen)
    return chosen
