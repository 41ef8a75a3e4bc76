"""Latent attention (MLA), as a config.json gives it. No torch; any process."""

from __future__ import annotations

from dataclasses import dataclass

from pdx.checkpoint.model_fields import Fields

__all__ = ["MlaConfig", "parse_mla"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """What a token leaves in KV memory is one record for all heads: a latent, from which each head
    makes its key and value, and a rotated part that all heads' keys share.
    """

    #: Rank of the projection that makes queries; None: they come from the hidden state at once.
    q_lora_rank: int | None
    #: Size of the latent.
    latent_dim: int
    #: Sizes in a head's query and key: the part without a position, and the part that is rotated.
    nope_dim: int
    rope_dim: int
    #: Size of a head's value.
    v_dim: int
    #: Whether a rotated pair are neighbours; else it is (x[i], x[i + rope_dim / 2]).
    interleaved: bool

    @property
    def float8_record_bytes(self) -> int:
        """A token's record where the KV cache is float8: a byte a value of the latent, 4 float32
        scales (one for each quarter), and the rotated part in bfloat16.
        """
        return self.latent_dim + 4 * 4 + 2 * self.rope_dim

    @property
    def record_dim(self) -> int:
        """Values of a token's record."""
        return self.latent_dim + self.rope_dim


def parse_mla(fields: Fields) -> MlaConfig:
    """Take the fields of a DeepSeek attention.

    Raises:
        CheckpointError: a number is missing or not served; it is named.
    """
    # Absent is not null: without the key transformers assumes V3's own size.
    q_lora_rank = fields.size("q_lora_rank") if fields.stated("q_lora_rank") else None
    rope_dim = fields.size("qk_rope_head_dim")
    if rope_dim % 2:
        raise fields.refused("qk_rope_head_dim", rope_dim)
    return MlaConfig(
        q_lora_rank=q_lora_rank,
        latent_dim=fields.size("kv_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=rope_dim,
        v_dim=fields.size("v_head_dim"),
        interleaved=fields.take("rope_interleave", bool, True),
    )
