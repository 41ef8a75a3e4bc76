"""`--check` of `pdx prefill` and `pdx decode`: what a node would take, without its weights.

Reads the settings and the model's config.json; starts nothing. Where the weights are on this disk,
this is taken for the host that the node would run on: then their headers, this host's memory, the
secret and the addresses are looked at too. A GPU is not looked for. No torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdx.cli.model_check import check_folder
from pdx.cli.rank_plan import RankPlan, plan_rank
from pdx.cli.tables import Table, print_tables
from pdx.config.engine import EngineConfig, runs_kernels
from pdx.config.resolve import Settings
from pdx.errors import ConfigError, PdxError

if TYPE_CHECKING:
    from pdx.checkpoint.model import ModelConfig

__all__ = ["check_deployment"]

_GIB = 1 << 30
_WEIGHTS = {True: "checked by their headers", False: "not here, so not looked at"}
#: Ranks of the other side of a link, for which the sizes of writes are told.
_PEER_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deployment:
    folder: Path
    #: Whether the weights are there.
    has_weights: bool
    model: ModelConfig
    config: EngineConfig
    #: None: the model cannot be split so.
    plan: RankPlan | None
    num_pages: int
    refusals: tuple[PdxError, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens the node's pages hold."""
        return self.num_pages * self.config.page_size


def check_deployment(settings: Settings) -> None:
    """Print what the node would take.

    Raises:
        ConfigError: it would refuse to start; every reason is named.
    """
    deployment = _plan(settings)
    print_tables(_tables(deployment))
    if deployment.refusals:
        refusals = "; ".join(map(_reason, deployment.refusals))
        error = ConfigError(f"this node would not start: {refusals}")
        error.exit_code = deployment.refusals[0].exit_code  # the start's own
        raise error


def _reason(error: PdxError) -> str:
    return error.message if error.hint is None else f"{error.message} ({error.hint})"


def _plan(settings: Settings) -> _Deployment:
    from pdx.checkpoint.model import ModelConfig
    from pdx.engine.start_check import plan_node
    from pdx.host.memory import read_memory_facts
    from pdx.host.memory_room import check_memory

    folder, has_weights = _folder(settings)
    model = ModelConfig.load(folder)
    # A decoder has the prefiller's page size unless it is told another.
    page_size = settings["page_size"] or EngineConfig().page_size
    config = settings.build(EngineConfig, page_size=page_size)
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype=model.dtype)
    plan, num_pages = None, 0
    refusals: list[PdxError] = []
    try:
        if has_weights:
            model = check_folder(folder, serves_text="peers" in settings.values)
        node = plan_node(model, config)
        num_pages = node.num_pages
        plan = plan_rank(
            model,
            page_size=page_size,
            dtype=config.dtype,
            kv_dtype=config.kv_type,
            tp_size=config.tp_size,
            keeps_float8=runs_kernels(config.device),
        )
        if has_weights and (need := node.host_memory()) is not None:
            check_memory(need, read_memory_facts())
    except PdxError as error:
        refusals.append(error)
    for check in _host_checks(settings, has_weights=has_weights):
        try:
            check()
        except PdxError as error:
            refusals.append(error)
    return _Deployment(
        folder=folder,
        has_weights=has_weights,
        model=model,
        config=config,
        plan=plan,
        num_pages=num_pages,
        refusals=tuple(refusals),
    )


def _host_checks(settings: Settings, *, has_weights: bool) -> list[Callable[[], None]]:
    """What a start looks at on its host before it loads the model: fabric, core, secret, addresses.
    Without the weights this is some other host, of which only the fabric is looked at.
    """
    from pdx.cli.serving import bind
    from pdx.fabric.start_check import check_fabric
    from pdx.host.worker_core import worker_core
    from pdx.messenger.control import parse_address
    from pdx.process.secret import require_secret, shared_secret

    def fabric() -> None:
        check_fabric(settings["fabric"], settings["fabric_bind"])

    def listen() -> None:
        with bind(parse_address(settings["listen"])) as listener:
            require_secret(listener, shared_secret(settings))

    def decode() -> None:
        shared_secret(settings)
        for peer in settings["peers"]:
            parse_address(peer)
        bind(parse_address(settings["http"])).close()

    def pin() -> None:
        worker_core(settings["fabric_core"], device=settings["device"])

    if not has_weights:
        return [fabric]
    return [fabric, pin, decode if "peers" in settings.values else listen]


def _folder(settings: Settings) -> tuple[Path, bool]:
    """Where config.json is: beside the file that names the model, else the model's own folder. And
    whether its weights are there.
    """
    from pdx.checkpoint.model_files import has_weight_files
    from pdx.checkpoint.model_source import resolve_description

    name: str | None = settings["model"]
    if name is None:
        raise ConfigError("--check needs the model", hint="name it with --model")
    beside = Path(settings.origins["model"]).parent
    if settings.origins["model"].endswith(".toml") and (beside / "config.json").is_file():
        return beside, has_weight_files(beside)
    folder = resolve_description(name)
    return folder, has_weight_files(folder)


def _tables(deployment: _Deployment) -> list[Table]:
    config, plan = deployment.config, deployment.plan
    rows = [
        ("config.json", str(deployment.folder / "config.json")),
        ("weights", _WEIGHTS[deployment.has_weights]),
        ("family", deployment.model.family.value),
        ("device", config.device if config.device == "cpu" else f"{config.device}, not looked for"),
        ("dtype", config.dtype),
        ("KV dtype", config.kv_type),
        ("ranks", str(config.tp_size)),
        ("would start", "no" if deployment.refusals else "yes"),
        *(("refused", _reason(refusal)) for refusal in deployment.refusals),
    ]
    tables = [Table(title="Node", rows=tuple(rows))]
    if plan is not None:
        tables += [_memory_table(deployment, plan), _writes_table(deployment)]
    return tables


def _memory_table(deployment: _Deployment, plan: RankPlan) -> Table:
    num_pages, page_size = deployment.num_pages, deployment.config.page_size
    kv_bytes = num_pages * page_size * plan.token_bytes
    context_len = deployment.model.max_position_embeddings
    fits = deployment.num_tokens // context_len if num_pages else 0
    rows = [
        ("weights", f"{plan.weight_bytes / _GIB:,.1f} GiB"),
        ("KV", f"{kv_bytes / _GIB:,.1f} GiB"),
        ("together", f"{(plan.weight_bytes + kv_bytes) / _GIB:,.1f} GiB"),
        ("KV of a token", f"{plan.token_bytes:,} bytes"),
        ("pages", f"{num_pages:,} of {page_size} tokens: {deployment.num_tokens:,} tokens"),
        ("full contexts", f"{fits:,} of {context_len:,} tokens"),
    ]
    return Table(
        title="Memory of each rank",
        rows=tuple(rows),
        note="activations and the driver come on top",
    )


def _writes_table(deployment: _Deployment) -> Table:
    from pdx.kv.geometry import check_tp_size, node_layout
    from pdx.messenger.plan import shares

    model, config = deployment.model, deployment.config
    ours = node_layout(model, config.page_size, 1, config.kv_type, config.tp_size)
    rows = []
    for peer_size in _PEER_SIZES:
        try:
            check_tp_size(model, peer_size)
        except ConfigError:
            continue
        peer = node_layout(model, config.page_size, 1, config.kv_type, peer_size)
        num_heads = max(share.num_heads for share in shares(ours, peer, 0))
        atom_bytes = num_heads * ours.rank.head_bytes
        rows.append((str(peer_size), f"{atom_bytes:,}"))
    return Table(
        title=f"Writes between this node and one with pages of {config.page_size} tokens too",
        columns=("its ranks", "bytes of a page of a layer"),
        rows=tuple(rows),
        note="neighbouring pages go in one write",
    )
