"""Sizes that the kernels of GPUs take, as data. Pure; no torch, no Triton.

A kernel's tile is a power of 2. Where a kernel masks what a size leaves over, any size will do;
where it does not, the size itself has to be one. Upper bounds are what registers and shared memory
hold. So a model is refused before ranks start and load it, and by ``pdx inspect model``, which has
neither GPU nor Triton. Each limit is of a kernel in ``pdx.kernels``; a test runs random sizes that
pass here through all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdx.checkpoint.experts import ExpertsConfig
from pdx.checkpoint.mla import MlaConfig
from pdx.checkpoint.model import ModelConfig
from pdx.errors import CheckpointError

__all__ = ["check_kernel_limits", "kernel_problems"]

#: A matrix instruction (``tl.dot``) sums over an axis of at least this length.
_MIN_DOT = 16
_MAX_HEAD_DIM = 256
#: ``rms_norm`` and ``add_rms_norm`` have whole rows in registers.
_MAX_ROW = 1 << 16
#: ``paged_prefill``: rows of a tile, of which a token takes one for each query head of a KV head.
_TILE_ROWS = 128
_SMALL_TILE_ROWS = 64
#: Above it ``paged_prefill`` has the small tile.
_WIDE_HEAD_DIM = 128
#: ``mla_decode`` keeps a latent for each of its rows in registers.
_MAX_LATENT_DIM = 512
_MAX_ROPE_DIM = 128
#: A quarter of a latent has a scale of its own in a float8 record, and a matrix product too.
_MIN_LATENT_DIM_OF_RECORD = 4 * _MIN_DOT
#: ``routing`` has all experts of a token in registers, ``expert_combine`` unrolls the chosen ones.
_MAX_EXPERTS = 1024
_MAX_CHOSEN = 64
#: Float8 weights come in square blocks with sides of this length (``gemm_tiles.QUANT_BLOCK``).
_WEIGHT_BLOCK = 128
#: Offsets within a page are 32 bits.
_MAX_PAGE_VALUES = 1 << 31


def check_kernel_limits(
    config: ModelConfig, *, tp_size: int, page_size: int, dtype: str, kv_dtype: str
) -> None:
    """Whether ranks that run the kernels of GPUs can serve a model. Arguments as of
    :func:`kernel_problems`.

    Raises:
        CheckpointError: naming each size that some kernel cannot take, and what it takes.
    """
    problems = list(
        kernel_problems(
            config, tp_size=tp_size, page_size=page_size, dtype=dtype, kv_dtype=kv_dtype
        )
    )
    if problems:
        raise CheckpointError(
            f"the kernels of GPUs cannot run this model: {'; '.join(problems)}",
            hint="use --device cpu, whose own ops take every size (without PDX_KERNELS=interpret)",
        )


def kernel_problems(
    config: ModelConfig, *, tp_size: int, page_size: int, dtype: str, kv_dtype: str
) -> Iterator[str]:
    """Every size that some kernel cannot take, with what it takes; config.json's names.

    Args:
        tp_size: ranks, which divide the model.
        page_size: tokens in a KV page.
        dtype: of weights and activations: "float32", ...
        kv_dtype: of the KV cache: the same, or "float8".
    """
    yield from _up_to("hidden_size", config.hidden_size, _MAX_ROW)
    if config.mla is None:
        yield from _grouped_attention(config, tp_size, dtype)
    else:
        yield from _latent_attention(config.mla, kv_dtype)
    if config.experts is not None:
        yield from _routing(config.experts)
    num_parts, part_dim = config.kv_parts
    values_of_token = num_parts * part_dim * max(1, config.num_kv_heads // tp_size)
    if page_size * values_of_token >= _MAX_PAGE_VALUES:
        most = (_MAX_PAGE_VALUES - 1) // values_of_token
        yield f"pages of {page_size:,} tokens (--page-size; at most {most:,})"
    blocks = config.quantization
    if blocks is not None and (blocks.num_rows, blocks.num_columns) != (_WEIGHT_BLOCK,) * 2:
        yield (
            f"weight_block_size = {blocks.num_rows} x {blocks.num_columns} "
            f"({_WEIGHT_BLOCK} x {_WEIGHT_BLOCK} is wanted)"
        )


def _grouped_attention(config: ModelConfig, tp_size: int, dtype: str) -> Iterator[str]:
    head_dim = config.head_dim
    # Tiles are of the next power of 2.
    if not _MIN_DOT // 2 < head_dim <= _MAX_HEAD_DIM:
        wanted = f"an even size from {_MIN_DOT // 2 + 2} to {_MAX_HEAD_DIM}"
        yield f"head_dim = {head_dim} ({wanted} is wanted)"
    is_small = dtype == "float32" or head_dim > _WIDE_HEAD_DIM
    most = _SMALL_TILE_ROWS if is_small else _TILE_ROWS
    kv_heads = max(1, config.num_kv_heads // tp_size)
    heads_of_one = config.num_heads // tp_size // kv_heads
    if heads_of_one > most:
        names = "num_attention_heads / num_key_value_heads"
        yield f"{names} = {heads_of_one} on a rank with {dtype} (at most {most})"


def _latent_attention(mla: MlaConfig, kv_dtype: str) -> Iterator[str]:
    is_record = kv_dtype == "float8"
    least = _MIN_LATENT_DIM_OF_RECORD if is_record else _MIN_DOT
    yield from _power_of_2("kv_lora_rank", mla.latent_dim, least, _MAX_LATENT_DIM)
    yield from _power_of_2("qk_rope_head_dim", mla.rope_dim, _MIN_DOT, _MAX_ROPE_DIM)
    yield from _power_of_2("qk_nope_head_dim", mla.nope_dim, _MIN_DOT, _MAX_HEAD_DIM)
    yield from _power_of_2("v_head_dim", mla.v_dim, _MIN_DOT, _MAX_HEAD_DIM)
    yield from _up_to("q_lora_rank", mla.q_lora_rank or 0, _MAX_ROW)


def _routing(experts: ExpertsConfig) -> Iterator[str]:
    yield from _up_to("the number of experts", experts.num_experts, _MAX_EXPERTS)
    yield from _up_to("num_experts_per_tok", experts.num_chosen, _MAX_CHOSEN)


def _power_of_2(name: str, size: int, least: int, most: int) -> Iterator[str]:
    if not least <= size <= most or size & (size - 1):
        yield f"{name} = {size:,} (a power of 2 from {least} to {most} is wanted)"


def _up_to(name: str, size: int, most: int) -> Iterator[str]:
    if size > most:
        yield f"{name} = {size:,} (at most {most:,})"
