"""Float8 weights that stay as they are stored: the same numbers, in half the memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.quantization import Float8Blocks
from pdx.errors import ConfigError
from pdx.kernels.ops import REFERENCE_OPS
from pdx.models.registry import CausalLM
from pdx.models.stored import stored_parts
from pdx.weights.index import WeightIndex
from pdx.weights.kept_float8 import kept_scales
from tests.models.comparison import LOGIT_TOLERANCE, altered, loaded, run
from tests.oracle.tiny_deepseek import DEEPSEEK_FLOAT8, write_float8
from tests.runner.rank_process import RankProcess, rank_config
from tests.weights.ranks import LastOf

KEEPING = replace(REFERENCE_OPS, keeps_float8=True)
#: float32 sums of the same products in another order, over three layers.
SAME = 2e-5


@pytest.fixture(scope="module")
def whole_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With experts whose halves are whole blocks, as in every published model."""
    folder = tmp_path_factory.mktemp("models") / "whole-experts"
    shared = {**DEEPSEEK_FLOAT8.shared, "moe_intermediate_size": 128}
    write_float8(replace(DEEPSEEK_FLOAT8, shared=shared), folder)
    return folder


def float8_names(model: CausalLM) -> set[str]:
    """Of the parameters, without the layer's number."""
    return {
        name.split(".", 3)[3]
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float8_e4m3fn
    }


@pytest.mark.parametrize("model", ["tiny_deepseek_float8", "whole_experts"])
def test_logits_are_those_of_the_dequantised(
    model: str, tiny_prompt_ids: list[int], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    ids = tiny_prompt_ids[:70]
    kept, _ = run(folder, [ids[:40], ids[40:69], ids[69:]], KEEPING)
    dequantised, _ = run(folder, [ids[:40], ids[40:69], ids[69:]])
    assert float((kept - dequantised).abs().max()) < SAME


def test_all_but_what_is_read_by_halves_is_kept(whole_experts: Path) -> None:
    model = loaded(whole_experts, KEEPING)
    mlps = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    assert float8_names(model) == {
        *(f"self_attn.{name}.weight" for name in ("q_a_proj", "q_b_proj", "o_proj")),
        "self_attn.kv_a_proj_with_mqa.weight",
        *(f"mlp.{name}" for name in mlps),
        *(f"mlp.shared_experts.{name}" for name in mlps),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    layer = model.model.layers[1]
    assert layer.mlp.experts.gate_up_proj_scale_inv.shape == (8, 2, 2)
    assert layer.self_attn.kv_b_proj.weight.dtype == torch.float32


def test_experts_whose_halves_end_within_a_block_are_dequantised(
    tiny_deepseek_float8: Path,
) -> None:
    names = float8_names(loaded(tiny_deepseek_float8, KEEPING))
    assert "mlp.shared_experts.gate_proj.weight" in names
    assert not any(".experts." in name for name in names)


@dataclass(frozen=True)
class First(LastOf):
    """A group's first rank."""

    rank = 0  # type: ignore[assignment]


def test_a_rank_that_cuts_blocks_is_refused(whole_experts: Path) -> None:
    with pytest.raises(ConfigError, match=r"this rank's 0 to \d+ of \d+ cut float8 blocks of 128"):
        loaded(whole_experts, KEEPING, tp=First(2))
    loaded(whole_experts, REFERENCE_OPS, tp=First(2))


def test_blocks_of_another_size_are_refused(whole_experts: Path) -> None:
    model, index = loaded(whole_experts), WeightIndex.open(whole_experts)
    parts = stored_parts(model, index.tensors)
    with pytest.raises(ConfigError, match=r"64 x 128, and kernels read blocks of 128 x 128"):
        kept_scales(model, parts, index, Float8Blocks(num_rows=64, num_columns=128))


def test_powers_of_two_as_scales_change_nothing(whole_experts: Path, tmp_path: Path) -> None:
    """DeepSeek-V3.1 says so of its scales; they are stored like others."""
    fields = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    folder = altered(whole_experts, tmp_path / "copy", quantization_config=fields)
    assert ModelConfig.load(folder).quantization == ModelConfig.load(whole_experts).quantization


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_interpreted_rank_gives_the_golden_ids(
    tiny_deepseek_float8: Path,
    deepseek_float8_oracle: object,
    tiny_prompt_ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: weights in float8, kernels for what has one."""
    from tests.oracle.transformers_oracle import Oracle

    assert isinstance(deepseek_float8_oracle, Oracle)
    monkeypatch.setenv("PDX_KERNELS", "interpret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prompt = tiny_prompt_ids[:40]
    with RankProcess(rank_config(tiny_deepseek_float8)) as rank:
        rank.wait_ready()
        tokens = rank.generate(1, prompt, 4, list(range(8)))
    assert deepseek_float8_oracle.greedy(prompt, 4).agrees_with([t.token_id for t in tokens])
    assert LOGIT_TOLERANCE > SAME


@pytest.mark.timeout(180)
def test_an_interpreted_rank_with_whole_experts_gives_the_dequantised_ids(
    whole_experts: Path, tiny_prompt_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts' products are Triton's over float8 blocks; the other has float32 weights."""
    prompt, found = tiny_prompt_ids[:9], []
    for kernels in ("", "interpret"):
        monkeypatch.setenv("PDX_KERNELS", kernels)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        with RankProcess(rank_config(whole_experts)) as rank:
            rank.wait_ready()
            found.append(rank.generate(1, prompt, 2, list(range(8))))
    dequantised, kept = found
    assert [t.token_id for t in kept] == [t.token_id for t in dequantised]
    for ours, theirs in zip(kept, dequantised, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-4)
