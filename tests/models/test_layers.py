"""Every layer's output is transformers': where a family differs, this names the layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pdx.kernels.ops import ops_for
from pdx.models.registry import CausalLM
from tests.models.comparison import run
from tests.oracle.transformers_oracle import Oracle

MODELS = {
    "tiny_llama": "tiny_oracle",
    "tiny_qwen3": "qwen3_oracle",
    "tiny_qwen3_moe": "qwen3_moe_oracle",
    "tiny_deepseek": "deepseek_oracle",
    "tiny_deepseek_plain": "deepseek_plain_oracle",
    "tiny_deepseek_float8": "deepseek_float8_oracle",
}
#: Hidden states are of size 1 or less; sums in another order end within 1e-6 here.
TOLERANCE = 1e-5


@pytest.mark.parametrize("folder", MODELS)
def test_hidden_states_of_every_layer_equal_transformers(
    folder: str, tiny_prompt_ids: list[int], request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(folder)
    oracle: Oracle = request.getfixturevalue(MODELS[folder])
    ids = tiny_prompt_ids[:170]
    ours: list[Tensor] = []

    def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
        ours.append(output)

    def watch(model: CausalLM) -> None:
        parts = [model.model.embed_tokens, *model.model.layers, model.model.norm]
        for part in parts:
            part.register_forward_hook(keep)

    run(path, [ids], ops_for("cpu"), change=watch)
    theirs = oracle.hidden_states(ids)
    # It gives the last layer's after the final norm alone.
    del ours[-2]
    assert len(ours) == len(theirs)
    errors = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    assert max(errors[:-1]) < TOLERANCE, errors
    assert errors[-1] < 100 * TOLERANCE, errors
    assert all(torch.isfinite(state).all() for state in ours)
