"""The sparse layers of a model, as its config.json gives them. No torch; any process.

A sparse layer has many MLPs (experts) and a router that picks a few of them for each token. The
routers' formulas are in ``pdx.kernels.reference.routing``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from pdx.checkpoint.model_fields import Fields

__all__ = [
    "ExpertsConfig",
    "GroupedRouting",
    "Routing",
    "SoftmaxRouting",
    "parse_deepseek_experts",
    "parse_qwen3_experts",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxRouting:
    """The most likely experts; their probabilities weigh their outputs."""

    #: Whether the router's weights have a bias among them, and whether they are in float32.
    has_bias: ClassVar[bool] = False
    is_float32: ClassVar[bool] = False

    #: Whether the weights of a token's experts are made to sum to 1.
    renormalise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRouting:
    """The highest sigmoids of the best groups of experts; a bias has a say in who is chosen."""

    has_bias: ClassVar[bool] = True
    is_float32: ClassVar[bool] = True

    num_groups: int
    #: Groups of one token.
    num_chosen_groups: int
    #: Whether the weights of a token's experts are made to sum to 1, before they are scaled.
    renormalise: bool
    #: What the weights are multiplied by.
    scale: float


# Every expert of every layer has tensors of its own. Published models have a tenth at most.
_MAX_EXPERTS = 4096
_MAX_EXPERTS_OF_ALL_LAYERS = 1 << 18

Routing: TypeAlias = SoftmaxRouting | GroupedRouting


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
    #: Inner size of the MLP that every token goes through besides; 0: there is none.
    shared_inner_size: int
    routing: Routing


def parse_qwen3_experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    """Qwen3-MoE's fields; None: every layer is dense.

    Raises:
        CheckpointError: a number is missing or not served; it is named.
    """
    # transformers 5 writes the other name.
    local = fields.take("num_local_experts", int, None)
    num_experts = fields.size("num_experts", local or ..., most=_MAX_EXPERTS)
    _check_all_layers(fields, "num_experts", num_experts, num_layers)
    step = fields.size("decoder_sparse_step", 1)
    dense = fields.take("mlp_only_layers", list, [])
    if any(type(i) is not int or not 0 <= i < num_layers for i in dense):
        raise fields.refused("mlp_only_layers", dense, f"layers are 0 to {num_layers - 1}")
    fields.require("shared_expert_intermediate_size", 0)
    fields.drop("output_router_logits", "router_aux_loss_coef")  # of training
    experts = ExpertsConfig(
        layers=frozenset(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense),
        num_experts=num_experts,
        num_chosen=_num_chosen(fields, num_experts),
        inner_size=fields.size("moe_intermediate_size"),
        shared_inner_size=0,
        routing=SoftmaxRouting(renormalise=fields.take("norm_topk_prob", bool, False)),
    )
    return experts if experts.layers else None


def parse_deepseek_experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    """DeepSeek-V3's fields; None: every layer is dense.

    Raises:
        CheckpointError: a number is missing or not served; it is named.
    """
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    fields.require("moe_layer_freq", 1)
    fields.drop("ep_size", "aux_loss_alpha", "seq_aux", "output_router_logits")  # of training
    num_dense = fields.take("first_k_dense_replace", int)
    if num_dense < 0:
        raise fields.refused("first_k_dense_replace", num_dense, "0 or more is wanted")
    if num_dense > num_layers:
        why = f"the model has {num_layers} layers"
        raise fields.refused("first_k_dense_replace", num_dense, why)
    num_experts = fields.size("n_routed_experts", most=_MAX_EXPERTS)
    _check_all_layers(fields, "n_routed_experts", num_experts, num_layers)
    num_groups = fields.size("n_group")
    # A group's score is the sum of its two best experts.
    if num_experts % num_groups or num_experts < 2 * num_groups:
        why = f"{num_experts} n_routed_experts make no even groups of two or more"
        raise fields.refused("n_group", num_groups, why)
    num_chosen_groups = fields.size("topk_group")
    if num_chosen_groups > num_groups:
        raise fields.refused("topk_group", num_chosen_groups, f"n_group is {num_groups}")
    num_chosen = _num_chosen(fields, num_experts // num_groups * num_chosen_groups)
    inner_size = fields.size("moe_intermediate_size")
    experts = ExpertsConfig(
        layers=frozenset(range(num_dense, num_layers)),
        num_experts=num_experts,
        num_chosen=num_chosen,
        inner_size=inner_size,
        shared_inner_size=inner_size * fields.size("n_shared_experts"),
        routing=GroupedRouting(
            num_groups=num_groups,
            num_chosen_groups=num_chosen_groups,
            renormalise=fields.take("norm_topk_prob", bool),
            scale=fields.number("routed_scaling_factor"),
        ),
    )
    return experts if experts.layers else None


def _check_all_layers(fields: Fields, name: str, num_experts: int, num_layers: int) -> None:
    most = _MAX_EXPERTS_OF_ALL_LAYERS
    if num_experts * num_layers > most:
        why = f"with {num_layers:,} layers at most {most // num_layers:,} are served"
        raise fields.refused(name, num_experts, why)


def _num_chosen(fields: Fields, most: int) -> int:
    chosen = fields.size("num_experts_per_tok")
    if chosen > most:
        raise fields.refused("num_experts_per_tok", chosen, f"there are {most} to choose from")
    return chosen
