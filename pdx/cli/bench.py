"""`pdx bench`: `serve` measures servers from the client's side; the others have their own files."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdx.cli import bench_kernels, bench_transfer
from pdx.cli.options import HELP_STYLE, with_settings
from pdx.cli.plots import check_plot, write_plot
from pdx.cli.tables import print_tables
from pdx.config.resolve import Settings
from pdx.errors import ConfigError
from pdx.lab.api import ApiError, api_base, headers, pick_model

if TYPE_CHECKING:
    from pdx.lab.load.client import Outcome, Target
    from pdx.lab.load.workload import Workload

__all__ = ["app"]

_LOAD, _LENGTHS, _REPORT = "Load", "Lengths", "Report"

app = typer.Typer(
    name="bench",
    help="Measure servers and the fabric.",
    no_args_is_help=False,
    rich_markup_mode=HELP_STYLE,
)

app.command("transfer")(bench_transfer.transfer)
app.command("kernels")(bench_kernels.kernels)


@app.callback()
def _group() -> None:
    """Measure servers and the fabric."""


@app.command("serve")
@with_settings()
def serve(
    settings: Settings,
    urls: Annotated[
        list[str],
        typer.Argument(metavar="URL [URL]", help="An API; two are compared in alternation."),
    ],
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="PER_SECOND",
            rich_help_panel=_LOAD,
            help="Requests a second, Poisson arrivals, however many are running (open loop); "
            "without --concurrency or a trace's own times: 1.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="REQUESTS", rich_help_panel=_LOAD, help="So many at a time instead."
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="REQUESTS",
            rich_help_panel=_LOAD,
            help="How many, for each server and round; without --duration and --trace: 100.",
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="SECONDS", rich_help_panel=_LOAD, help="Send none after this time."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(rich_help_panel=_LOAD, metavar="NUMBER", help="Of everything drawn.")
    ] = 0,
    prompt_mean: Annotated[
        float,
        typer.Option(
            min=1, metavar="TOKENS", rich_help_panel=_LENGTHS, help="Mean length of the prompts."
        ),
    ] = 512,
    prompt_sigma: Annotated[
        float,
        typer.Option(
            min=0,
            max=4,
            metavar="NUMBER",
            rich_help_panel=_LENGTHS,
            help="Deviation of the length's logarithm (log-normal); 0: all are equal.",
        ),
    ] = 0.8,
    output_mean: Annotated[
        float,
        typer.Option(
            min=1, metavar="TOKENS", rich_help_panel=_LENGTHS, help="Mean length of the outputs."
        ),
    ] = 128,
    output_sigma: Annotated[
        float,
        typer.Option(
            min=0, max=4, metavar="NUMBER", rich_help_panel=_LENGTHS, help="The same, of outputs."
        ),
    ] = 0.6,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_LENGTHS,
            help="Lengths (and arrival times) from lines of JSON instead: prompt_tokens, "
            "output_tokens, arrival_s.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="TOKENS",
            rich_help_panel=_LENGTHS,
            help="Cut prompt and output to this sum; by default to what the server names.",
        ),
    ] = None,
    token_ids: Annotated[
        str,
        typer.Option(
            metavar="LOW-HIGH", rich_help_panel=_LENGTHS, help="Prompts are drawn from these."
        ),
    ] = "100-500",
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="NAME", help="The server's first model by default."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="PDX_API_KEY", metavar="KEY", help="Sent as a bearer token."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="A silent server has failed after this."),
    ] = 600,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, metavar="ROUNDS", rich_help_panel=_REPORT, help="Times that each is measured."
        ),
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_REPORT, help="Print one JSON object.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_REPORT,
            help="Draw how times are distributed: .svg, or .png where cairosvg is installed.",
        ),
    ] = None,
) -> None:
    """Measure an OpenAI-compatible server: times to tokens and throughput under a load.

    Prompts are random token ids, so no cache of prefixes helps. The server must take these, and
    ignore_eos, as pdx, vLLM and SGLang do.
    """
    import asyncio

    from pdx.lab.load.workload import Lengths, Workload, read_trace

    if len(urls) > 2:
        raise ConfigError(f"two servers can be compared, not {len(urls)}")
    check_plot(plot)
    rows = None if trace is None else read_trace(trace)
    targets, limit = _targets(urls, model, api_key, timeout)
    workload = Workload(
        prompt=Lengths(mean=prompt_mean, sigma=prompt_sigma),
        output=Lengths(mean=output_mean, sigma=output_sigma),
        trace=rows,
        rate=_rate(rate, concurrency, rows is not None and rows[0].arrival_s is not None),
        concurrency=concurrency,
        num_requests=requests if requests or duration or rows else 100,
        duration_s=duration,
        token_ids=_id_range(token_ids),
        context_len=context or limit,
        seed=seed,
    )
    figures, times = asyncio.run(_measure(targets, workload, rounds))
    _report(targets, figures, as_json=as_json)
    if plot is not None:
        from pdx.lab.load.plot import distribution_svg

        write_plot(plot, distribution_svg([each.base for each in targets], times))
    if not any(each["completed"] for pair in figures for each in pair):
        raise ApiError("no request was completed", kind="none")


def _rate(rate: float | None, concurrency: int | None, has_times: bool) -> float | None:
    if rate is not None and concurrency is not None:
        raise ConfigError("--rate and --concurrency exclude each other")
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--rate {rate:g}: it must be above 0")
    return 1.0 if rate is None and concurrency is None and not has_times else rate


def _id_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(f"--token-ids {text}: write LOW-HIGH, such as 100-500")
    return int(match[1]), int(match[2])


def _targets(
    urls: list[str], model: str | None, api_key: str | None, timeout_s: float
) -> tuple[list[Target], int | None]:
    """The servers, and the shortest context that one of them names."""
    import httpx

    from pdx.lab.load.client import Target

    targets, limits = [], []
    with httpx.Client(headers=headers(api_key), timeout=10.0) as client:
        for base in map(api_base, urls):
            name = model or pick_model(client, base)
            targets.append(Target(base=base, model=name, api_key=api_key, timeout_s=timeout_s))
            with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
                models = client.get(f"{base}/models").json()["data"]
                limits += [m["max_model_len"] for m in models if m.get("id") == name]
    known = [limit for limit in limits if isinstance(limit, int)]
    return targets, min(known, default=None)


@dataclass(frozen=True, slots=True)
class _Round:
    figures: dict[str, Any]
    outcomes: list[Outcome]


async def _measure(
    targets: list[Target], workload: Workload, num_rounds: int
) -> tuple[list[list[dict[str, Any]]], list[dict[str, list[float]]]]:
    """Figures by round and server, and each server's times over all rounds."""
    from pdx.cli.load_report import times_of
    from pdx.lab.load.client import try_once
    from pdx.lab.load.workload import Job

    first = Job(index=0, arrival_s=None, output_len=2, prompt_ids=[workload.token_ids[0]] * 4)
    for target in targets:
        await try_once(target, first)
    found: list[list[_Round]] = []
    total = None if workload.num_requests is None else workload.num_requests * len(targets)
    with _progress(total and total * num_rounds) as on_done:
        for i in range(num_rounds):
            # The order turns round, so that a machine that drifts favours neither.
            order = list(range(len(targets)))[:: -1 if i % 2 else 1]
            pair = {j: await _round(targets[j], workload, i, on_done) for j in order}
            found.append([pair[j] for j in range(len(targets))])
    everything = [[o for pair in found for o in pair[j].outcomes] for j in range(len(targets))]
    figures = [[each.figures for each in pair] for pair in found]
    return figures, [times_of(outcomes) for outcomes in everything]


async def _round(
    target: Target, workload: Workload, i: int, on_done: Callable[[Outcome], None]
) -> _Round:
    from pdx.cli.load_report import summary
    from pdx.lab.load.client import run_load
    from pdx.lab.load.workload import jobs

    outcomes, wall_s = await run_load(
        target,
        jobs(workload, i),
        concurrency=workload.concurrency,
        duration_s=workload.duration_s,
        on_done=on_done,
    )
    return _Round(summary(outcomes, wall_s), outcomes)


def _report(targets: list[Target], rounds: list[list[dict[str, Any]]], *, as_json: bool) -> None:
    from pdx.cli.load_report import ratios, tables

    urls = [target.base for target in targets]
    if not as_json:
        print_tables(tables(urls, rounds))
        return
    result: dict[str, Any] = {
        "urls": urls,
        "models": [target.model for target in targets],
        "rounds": rounds,
    }
    if len(targets) == 2:
        result["ratios"] = [ratios(first, second) for first, second in rounds]
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


@contextlib.contextmanager
def _progress(total: int | None) -> Iterator[Callable[[Outcome], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda outcome: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    failed = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=total)

        def done(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.error is not None
            text = f"requests, {failed} failed" if failed else "requests"
            progress.update(task, advance=1, description=text)

        yield done
