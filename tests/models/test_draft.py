"""DeepSeek's layer that drafts, loaded from its tensors: its logits are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdx.checkpoint.model import ModelConfig
from pdx.kernels.batch import ForwardBatch
from pdx.kernels.ops import REFERENCE_OPS, Ops, ops_for
from pdx.models.decoder import LayerPass
from pdx.models.deepseek_draft import DraftLayer
from pdx.models.registry import build_drafts, build_model
from pdx.models.rope import RotaryEmbedding
from pdx.weights.load import load_parameters
from tests.models.comparison import LOGIT_TOLERANCE, PAGE_SIZE, empty_kv
from tests.oracle.transformers_oracle import Oracle


def loaded_draft(folder: Path, config: ModelConfig, ops: Ops) -> DraftLayer:
    with torch.device("meta"):
        drafts, model = build_drafts(config, ops), build_model(config, ops)
    load_parameters(drafts, folder, torch.float32, lambda done, total: None, left_on_disk=model)
    layer = drafts.get_submodule(f"model.layers.{config.num_layers}")
    assert isinstance(layer, DraftLayer)
    return layer


@pytest.fixture(scope="module")
def drafting_oracle(tiny_deepseek: Path) -> Oracle:
    """One of its own: transformers finds the drafting layer where the model was loaded from, which
    it forgets when it saves the model elsewhere.
    """
    return Oracle(tiny_deepseek)


@pytest.mark.parametrize("length", [2, 33, 170])
@pytest.mark.parametrize("ops", [REFERENCE_OPS, ops_for("cpu")], ids=["reference", "cpu"])
def test_first_draft_after_a_prompt_equals_transformers(
    length: int,
    ops: Ops,
    tiny_deepseek: Path,
    drafting_oracle: Oracle,
    tiny_prompt_ids: list[int],
) -> None:
    config = ModelConfig.load(tiny_deepseek)
    layer = loaded_draft(tiny_deepseek, config, ops)
    prompt = tiny_prompt_ids[:length]
    next_id, expected = drafting_oracle.first_draft(prompt)
    hidden = drafting_oracle.hidden_states(prompt)[-1]
    num_pages = -(-length // PAGE_SIZE)
    positions = torch.arange(length)
    layer_pass = LayerPass(
        cos_sin=RotaryEmbedding(config.rope, config.rope_dim)(positions),
        kv=empty_kv(config, num_pages)[0],
        batch=ForwardBatch.build(PAGE_SIZE, [(0, length, list(range(num_pages)))]),
        on_kv_ready=lambda: None,
    )
    with torch.inference_mode():
        out = layer.draft(hidden, torch.tensor([*prompt[1:], next_id]), layer_pass)
        logits = ops.linear(out[-1:], layer.shared_head.head.weight, None)[0]
    assert float((logits - expected).abs().max()) < LOGIT_TOLERANCE
