"""`pdx inspect model`: a checkpoint's geometry, its size, and how many tokens fit which memory.

Reads config.json and the headers of the weights: no torch, and no weights are downloaded.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdx.checkpoint.folder import Checkpoint
from pdx.cli.model_check import check_text
from pdx.cli.options import with_settings
from pdx.cli.rank_plan import GPU_SIZES_GIB, RankPlan, plan_ranks, ranks_table, weights_table
from pdx.cli.tables import Table, print_tables
from pdx.config.engine import EngineConfig
from pdx.config.node import ModelChoice
from pdx.config.resolve import Settings
from pdx.config.setting import pick
from pdx.errors import CheckpointError, PdxError

if TYPE_CHECKING:
    from pdx.checkpoint.model import ModelConfig
    from pdx.checkpoint.rope import RopeConfig
    from pdx.checkpoint.weight_headers import StoredTensor

__all__ = ["model"]

_GIB = 1 << 30
_KV_SIZES_GIB = (1, 2, 4, 8, 16, 32, 64, 80)


#: Settings of a node that decide whether it would serve the model.
_ASKED = ("device", "dtype", "tp_size", "kv_dtype", "page_size")


@with_settings(
    [*pick(ModelChoice, required=["model"]), *pick(EngineConfig, *_ASKED)],
    argument="model",
)
def model(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a model's geometry, its memory, and whether it is served.

    Exit code 1 where it is not, with the reason. The headers of the weights are read, not they.
    """
    report = _inspect(settings["model"], settings.build(EngineConfig))
    if as_json:
        sys.stdout.write(json.dumps(_as_json(report)) + "\n")
    else:
        print_tables(_as_tables(report))
    if report.refusal is not None:
        raise report.refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    num_parameters: int
    #: Parameters of the layers that only draft, which nodes leave on disk.
    num_draft_parameters: int
    #: In all files, as stored.
    stored_bytes: int
    num_files: int
    #: Values by stored type.
    values_by_type: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """What a memory of some size holds."""

    memory_bytes: int
    #: Left for KV pages; negative: the weights do not fit.
    kv_bytes: int
    num_pages: int
    num_tokens: int
    #: Requests as long as the model's context.
    num_full_contexts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    dtype: str
    kv_dtype: str
    weight_bytes: int
    page_size: int
    #: KV of one page over all layers.
    page_bytes: int
    token_bytes: int
    #: What `pdx generate --draft` loads besides, and has more of a token; 0 where it cannot.
    draft_weight_bytes: int
    draft_token_bytes: int
    kv_fits: tuple[_Fit, ...]
    gpu_fits: tuple[_Fit, ...]
    #: A rank of each number of ranks that the model can be split over.
    ranks: tuple[RankPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    name: str
    folder: Path
    #: None: they cannot be read.
    weights: _Weights | None
    #: None: it cannot be read.
    config: ModelConfig | None
    memory: _Memory | None
    #: None: the model is served.
    refusal: PdxError | None
    #: Why not on a GPU; also asked where the device is a CPU.
    gpu_refusals: tuple[str, ...]
    #: What is served, and yet worth knowing.
    warnings: tuple[str, ...]


def _inspect(name: str, asked: EngineConfig) -> _Report:
    from pdx.checkpoint.model import ModelConfig
    from pdx.checkpoint.model_source import describe_weights, resolve_description

    folder = resolve_description(name)
    tensors: dict[str, StoredTensor] | None = None
    config: ModelConfig | None = None
    refusal: PdxError | None = None
    warnings: tuple[str, ...] = ()
    try:
        try:
            tensors = describe_weights(name)[1]
        finally:  # a configuration is worth showing without weights, too
            config = ModelConfig.load(folder)
        _refuse_quantized(tensors, config)
        checkpoint = Checkpoint.of(folder, config, tensors)
        config, warnings = checkpoint.model, checkpoint.warnings
        _check_the_rest(folder, config, asked)
    except PdxError as error:
        error.exit_code = 1  # also where a setting is at fault: the question has been answered
        refusal = error
    weights = None if tensors is None else _weights(tensors, config)
    memory = None
    if config is not None and weights is not None:
        memory = _memory(config, weights, asked)
    return _Report(
        name=name,
        folder=folder,
        weights=weights,
        config=config,
        memory=memory,
        refusal=refusal,
        gpu_refusals=() if config is None else _gpu_refusals(config, asked),
        warnings=warnings,
    )


def _check_the_rest(folder: Path, config: ModelConfig, asked: EngineConfig) -> None:
    from pdx.checkpoint.token_ids import ids_without_token
    from pdx.engine.start_check import plan_node

    ids_without_token(folder, config.vocab_size)
    check_text(folder)
    plan_node(config, asked)


def _gpu_refusals(config: ModelConfig, asked: EngineConfig) -> tuple[str, ...]:
    """Why the kernels of GPUs cannot run the model, whichever device was asked about."""
    from pdx.checkpoint.kernel_limits import kernel_problems

    resolved = dataclasses.replace(
        asked, dtype=config.dtype if asked.dtype == "auto" else asked.dtype
    )
    return tuple(
        kernel_problems(
            config,
            tp_size=resolved.tp_size,
            page_size=resolved.page_size,
            dtype=resolved.dtype,
            kv_dtype=resolved.kv_type,
        )
    )


def _refuse_quantized(tensors: dict[str, StoredTensor], config: ModelConfig) -> None:
    from pdx.checkpoint.quantization import SCALE_SUFFIX

    blocks = config.quantization
    quantized = [
        name
        for name, tensor in tensors.items()
        if not tensor.is_float
        and not (blocks and tensor.is_float8 and name + SCALE_SUFFIX in tensors)
    ]
    if quantized:
        first = quantized[0]
        raise CheckpointError(
            f"{len(quantized)} weights are quantized, the first is {first}: {tensors[first].dtype}",
            hint="pdx serves weights in float32, bfloat16, float16 and float8 blocks",
        )


def _weights(tensors: dict[str, StoredTensor], config: ModelConfig | None) -> _Weights:
    by_type: Counter[str] = Counter()
    num_draft_values = 0
    for name, tensor in tensors.items():
        if _is_no_parameter(name, config):
            continue
        if _drafts(name, config):
            num_draft_values += tensor.num_values
        else:
            by_type[tensor.dtype] += tensor.num_values
    return _Weights(
        num_parameters=by_type.total(),
        num_draft_parameters=num_draft_values,
        stored_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        num_files=len({tensor.path for tensor in tensors.values()}),
        values_by_type=dict(by_type.most_common()),
    )


def _is_no_parameter(name: str, config: ModelConfig | None) -> bool:
    """Stored copies of what is there already, and scales."""
    from pdx.checkpoint.quantization import SCALE_SUFFIX

    if name.endswith("rotary_emb.inv_freq"):
        return True
    if config is None:
        return False
    is_scale = config.quantization is not None and name.endswith(SCALE_SUFFIX)
    return is_scale or (config.tie_word_embeddings and name == "lm_head.weight")


def _drafts(name: str, config: ModelConfig | None) -> bool:
    if config is None:
        return False
    layers = range(config.num_layers, config.num_layers + config.num_draft_layers)
    return any(name.startswith(f"model.layers.{layer}.") for layer in layers)


def _memory(config: ModelConfig, weights: _Weights, asked: EngineConfig) -> _Memory:
    from pdx.kv.geometry import ITEMSIZE, kv_layout

    dtype, page_size = config.dtype if asked.dtype == "auto" else asked.dtype, asked.page_size
    kv_dtype = dataclasses.replace(asked, dtype=dtype).kv_type
    page = kv_layout(config, page_size, 1, kv_dtype)
    weight_bytes = weights.num_parameters * ITEMSIZE[dtype]
    may_draft = config.num_draft_layers == 1 and weights.num_draft_parameters > 0
    draft_token_bytes = 0
    if may_draft:
        drafting = kv_layout(config, page_size, 1, kv_dtype, drafts=True)
        draft_token_bytes = drafting.token_bytes - page.token_bytes

    def fit(memory_bytes: int, kv_bytes: int) -> _Fit:
        num_pages = max(kv_bytes, 0) // page.total_bytes
        pages_of_context = page.num_pages_for(config.max_position_embeddings)
        return _Fit(
            memory_bytes=memory_bytes,
            kv_bytes=kv_bytes,
            num_pages=num_pages,
            num_tokens=num_pages * page_size,
            num_full_contexts=num_pages // pages_of_context,
        )

    return _Memory(
        dtype=dtype,
        kv_dtype=kv_dtype,
        weight_bytes=weight_bytes,
        page_size=page_size,
        page_bytes=page.total_bytes,
        token_bytes=page.token_bytes,
        draft_weight_bytes=weights.num_draft_parameters * ITEMSIZE[dtype] if may_draft else 0,
        draft_token_bytes=draft_token_bytes,
        kv_fits=tuple(fit(gib * _GIB, gib * _GIB) for gib in _KV_SIZES_GIB),
        gpu_fits=tuple(fit(gib * _GIB, gib * _GIB - weight_bytes) for gib in GPU_SIZES_GIB),
        ranks=tuple(plan_ranks(config, page_size=page_size, dtype=dtype, kv_dtype=kv_dtype)),
    )


def _as_json(report: _Report) -> dict[str, Any]:
    refusal = report.refusal
    return {
        "model": report.name,
        "folder": str(report.folder),
        "served": refusal is None,
        "refusal": None if refusal is None else refusal.message,
        "hint": None if refusal is None else refusal.hint,
        "gpu_refusals": list(report.gpu_refusals),
        "warnings": list(report.warnings),
        "weights": None if report.weights is None else dataclasses.asdict(report.weights),
        "config": None if report.config is None else _config_json(report.config),
        "memory": None if report.memory is None else dataclasses.asdict(report.memory),
    }


def _config_json(config: ModelConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    fields["rope"]["kind"] = _rope_kind(config.rope)
    if config.experts is not None:
        fields["experts"]["layers"] = sorted(config.experts.layers)
    return fields


def _as_tables(report: _Report) -> list[Table]:
    tables = [_head(report)]
    if report.config is not None:
        tables.append(_geometry(report.config))
    if report.memory is not None:
        tables += [_cache(report.memory), _kv_table(report.memory), _gpu_table(report.memory)]
    if report.config is not None and report.memory is not None:
        tables += [weights_table(report.config), ranks_table(list(report.memory.ranks))]
    return tables


def _head(report: _Report) -> Table:
    weights, refusal = report.weights, report.refusal
    rows = [
        ("folder", str(report.folder)),
        ("served", "yes" if refusal is None else "no"),
    ]
    if refusal is not None:
        rows.append(("refused", refusal.message))
        rows += [("hint", refusal.hint)] if refusal.hint else []
    elif report.gpu_refusals:
        rows.append(("not on a GPU", "; ".join(report.gpu_refusals)))
    rows += [("warning", warning) for warning in report.warnings]
    if weights is not None:
        types = ", ".join(f"{kind} {count:,}" for kind, count in weights.values_by_type.items())
        rows += [
            ("parameters", f"{weights.num_parameters:,} ({types})"),
            ("stored", f"{_size(weights.stored_bytes)} in {_count(weights.num_files, 'file')}"),
        ]
    return Table(title=report.name, rows=tuple(rows))


def _geometry(config: ModelConfig) -> Table:
    biases = [
        name
        for name, has in (("attention", config.attention_bias), ("MLP", config.mlp_bias))
        if has
    ]
    rows = [
        ("family", config.family.value),
        ("layers", f"{config.num_layers:,}"),
        ("hidden size", f"{config.hidden_size:,}"),
        ("MLP size", f"{config.intermediate_size:,}"),
        *_attention_rows(config),
        *_experts_rows(config),
        ("biases", ", ".join(biases) or "none"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("output head", "the embedding" if config.tie_word_embeddings else "its own"),
        ("RMSNorm epsilon", f"{config.rms_norm_eps:g}"),
        ("rope", _rope_text(config.rope)),
        ("context", _count(config.max_position_embeddings, "token")),
        ("stored type", config.dtype),
        ("BOS", "none" if config.bos_token_id is None else str(config.bos_token_id)),
        ("EOS", ", ".join(map(str, config.eos_token_ids)) or "none"),
    ]
    return Table(title="Geometry", rows=tuple(rows))


def _attention_rows(config: ModelConfig) -> list[tuple[str, str]]:
    heads, mla = f"{config.num_heads} of {config.head_dim}", config.mla
    if mla is None:
        return [("heads", f"{heads}, {config.num_kv_heads} for K and V")]
    queries = f"{mla.q_lora_rank:,}" if mla.q_lora_rank else "none"
    return [
        ("heads", f"{heads}, of which {mla.rope_dim} are rotated; values of {mla.v_dim}"),
        ("KV record", f"latent of {mla.latent_dim} and {mla.rope_dim} rotated, for all heads"),
        ("query latent", queries),
    ]


def _experts_rows(config: ModelConfig) -> list[tuple[str, str]]:
    experts = config.experts
    if experts is None:
        return []
    text = f"{experts.num_experts} of size {experts.inner_size:,}, {experts.num_chosen} per token"
    if experts.shared_inner_size:
        text += f", and one of {experts.shared_inner_size:,} for all"
    rows = [("experts", text), ("sparse layers", f"{len(experts.layers)} of {config.num_layers}")]
    if config.num_draft_layers:
        rows.append(("drafting layers", str(config.num_draft_layers)))
    return rows


def _cache(memory: _Memory) -> Table:
    rows = [
        ("weights", _size(memory.weight_bytes)),
        ("KV of a token", f"{memory.token_bytes:,} bytes"),
        ("KV of a page", f"{memory.page_bytes:,} bytes, {_count(memory.page_size, 'token')}"),
    ]
    if memory.draft_weight_bytes:
        kv = f"{memory.draft_token_bytes:,} bytes of KV a token"
        rows.append(("--draft takes besides", f"{_size(memory.draft_weight_bytes)}, {kv}"))
    kv = "" if memory.kv_dtype == memory.dtype else f", KV in {memory.kv_dtype}"
    return Table(title=f"Memory in {memory.dtype}{kv}", rows=tuple(rows))


def _kv_table(memory: _Memory) -> Table:
    return Table(
        title="What fits a KV cache",
        columns=("KV memory", "pages", "tokens", "full contexts"),
        rows=tuple((_size(fit.memory_bytes), *_fit_cells(fit)) for fit in memory.kv_fits),
    )


def _gpu_table(memory: _Memory) -> Table:
    rows = []
    for fit in memory.gpu_fits:
        if fit.kv_bytes < 0:
            cells = ("weights do not fit", "-", "-", "-")
        else:
            cells = (_size(fit.kv_bytes), *_fit_cells(fit))
        rows.append((_size(fit.memory_bytes), *cells))
    return Table(
        title="What a device has left beside the weights",
        columns=("device", "left", "pages", "tokens", "full contexts"),
        rows=tuple(rows),
        note="activations and the driver take their share of it",
    )


def _fit_cells(fit: _Fit) -> tuple[str, str, str]:
    return f"{fit.num_pages:,}", f"{fit.num_tokens:,}", f"{fit.num_full_contexts:,}"


def _rope_kind(rope: RopeConfig) -> str:
    from pdx.checkpoint.rope import DynamicNtkScaling, LinearScaling, Llama3Scaling, YarnScaling

    match rope.scaling:
        case None:
            return "default"
        case LinearScaling():
            return "linear"
        case DynamicNtkScaling():
            return "dynamic"
        case Llama3Scaling():
            return "llama3"
        case YarnScaling():
            return "yarn"


def _rope_text(rope: RopeConfig) -> str:
    text = f"theta {rope.theta:,.0f}"
    if rope.scaling is None:
        return text
    numbers = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"
        for name, value in dataclasses.asdict(rope.scaling).items()
        if not isinstance(value, bool)
    ]
    return f"{text}, {_rope_kind(rope)}: {', '.join(numbers)}".replace("_", " ")


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", _GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            value = num_bytes / factor
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
    return f"{num_bytes} bytes"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
