"""`pdx prefill`: a prefill node."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pdx.cli.options import CheckOption, with_settings
from pdx.cli.output import status_line
from pdx.config.engine import EngineConfig
from pdx.config.node import DrainConfig, FabricConfig, ModelChoice
from pdx.config.providers import FabricChoice
from pdx.config.resolve import Settings
from pdx.config.setting import pick

if TYPE_CHECKING:
    from pdx.cli.serving import DrainRequest
    from pdx.messenger.control import Address

__all__ = ["PREFILL_SETTINGS", "prefill"]

PREFILL_SETTINGS = [
    *pick(ModelChoice, required=["model"]),
    *pick(EngineConfig, without=["cuda_graphs"]),  # it decodes nothing
    *pick(FabricConfig, "listen", "fabric", "fabric_bind", "fabric_core"),
    *pick(FabricConfig, "secret_file", "secret"),
    *pick(DrainConfig),
]


@with_settings(PREFILL_SETTINGS)
def prefill(settings: Settings, check: CheckOption = False) -> None:
    """Run prompts for decoders and write their KV cache across while computing."""
    from pdx.cli.deployment import check_deployment
    from pdx.cli.serving import run_until_signal

    if check:
        check_deployment(settings)
        return
    run_until_signal(lambda request: _serve(settings, request))


def _command(address: Address, secret_file: str | None) -> str:
    """What starts a decoder for this node, quoted for a shell."""
    words = ["pdx", "decode", "--peer", str(address)]
    if secret_file is not None:
        words += ["--secret-file", str(Path(secret_file).expanduser().absolute())]
    return shlex.join(words)


def _say_ready(addresses: list[Address], settings: Settings) -> None:
    from pdx.cli.serving import say_ready

    notes = []
    if len(addresses) > 1:
        notes.append(f"this host has other addresses too: {', '.join(map(str, addresses[1:]))}")
    if settings["secret"] is not None:
        notes.append("with the PDX_SECRET of this node")
    what = f"for a decoder ({'; '.join(notes)})" if notes else "for a decoder"
    say_ready(addresses[0], _command(addresses[0], settings["secret_file"]), what=what)


async def _serve(settings: Settings, drain: DrainRequest) -> None:
    from pdx.checkpoint.model_source import model_is_folder, resolve_model
    from pdx.cli.loading_view import loading_progress
    from pdx.cli.serving import bind, faults, report_on_request, run_until_drained
    from pdx.engine.loading import load_model
    from pdx.engine.prefill_node import PrefillNode
    from pdx.fabric.start_check import check_fabric
    from pdx.host.worker_core import worker_core
    from pdx.messenger.control import parse_address
    from pdx.process.secret import require_secret, shared_secret

    model: str = settings["model"]
    secret = shared_secret(settings)
    opener, num_rejected = faults()
    # Before the model is loaded too: without a fabric nothing could be sent.
    check_fabric(settings["fabric"], settings["fabric_bind"])
    fabric_cpu = worker_core(settings["fabric_core"], device=settings["device"])
    async with contextlib.AsyncExitStack() as closing:
        # Before the model is loaded: a port that is taken should not cost a minute. Decoders that
        # connect meanwhile wait in the backlog.
        listener = closing.enter_context(bind(parse_address(settings["listen"])))
        require_secret(listener, secret)
        folder = resolve_model(model)
        with loading_progress(model) as progress:
            config = settings.build(EngineConfig, cuda_graphs=False)
            loaded = await load_model(folder, config, progress)
        closing.push_async_callback(loaded.close)
        node = PrefillNode(
            loaded,
            # A folder is announced by its absolute path: a decoder on this host may run elsewhere.
            model_name=str(folder) if model_is_folder(model) else model,
            listener=listener,
            fabric=FabricChoice(settings["fabric"]),
            fabric_cpu=fabric_cpu,
            fabric_bind=settings["fabric_bind"],
            secret=secret,
            opener=opener,
            num_rejected=num_rejected,
        )
        closing.push_async_callback(node.stop, "the prefiller shuts down")
        addresses = await node.listen()
        layout = loaded.layout.rank
        report_on_request(node.status)
        status_line(
            f"serving {model} ({loaded.config.dtype}, {layout.num_pages} pages of "
            f"{layout.page_size} tokens), loaded in {loaded.load_s:.1f} s"
        )
        _say_ready(addresses, settings)
        await run_until_drained(node, drain, settings["drain_timeout_s"])
