"""Weights that are stored as float8 with a scale for each block, and where ranks may cut them. No
torch; any process.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3. A matrix is cut into blocks
from its first row and column on; the last ones may be partial. Each block's scale, by which its
values are multiplied, is in a tensor beside the matrix, named with ``SCALE_SUFFIX``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdx.checkpoint.model_fields import MAX_SIZE, Fields

__all__ = ["SCALE_SUFFIX", "Float8Blocks", "parse_quantization"]

SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Blocks:
    """Size of a block."""

    num_rows: int
    num_columns: int

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a matrix, or of a stack of matrices."""
        *leading, rows, columns = shape
        return (*leading, -(-rows // self.num_rows), -(-columns // self.num_columns))


def parse_quantization(fields: Fields) -> Float8Blocks | None:
    """Take ``quantization_config``; None: weights are as they are.

    Raises:
        CheckpointError: it describes weights that are not served.
    """
    value = fields.take("quantization_config", dict, None)
    if value is None:
        return None
    inner = Fields(fields.path, value)
    blocks = inner.take("weight_block_size", list, [])
    if inner.take("quant_method", str, None) != "fp8" or len(blocks) != 2:
        why = "served is quant_method fp8 with a weight_block_size of rows and columns"
        raise fields.refused("quantization_config", value, why)
    if any(type(size) is not int or not 0 < size <= MAX_SIZE for size in blocks):
        raise fields.refused("weight_block_size", blocks, "positive integers are wanted")
    inner.require("fmt", "e4m3")
    # How activations would be quantized: we compute with them as they are, which is more exact.
    inner.require("activation_scheme", "dynamic")
    # All scales are powers of two here; they are stored as other scales are, and mean the same.
    inner.require("scale_fmt", "ue8m0")
    inner.drop("modules_to_not_convert", "ignored_layers")  # each tensor's type says it
    inner.refuse_rest()
    return Float8Blocks(num_rows=blocks[0], num_columns=blocks[1])
