"""`pdx sim`: the whole cluster in one process, in virtual time, with faults drawn from a seed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdx.cli.options import with_settings
from pdx.cli.output import status_line
from pdx.config.resolve import Settings
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.lab.sim.history import Outcome
    from pdx.lab.sim.scenario import FaultKind, ScenarioOptions

__all__ = ["sim"]

_SCENARIO = "Scenario"
_PROGRESS_HISTORIES = 100
#: What has become of a request, where the word alone could be taken for a fault of pdx.
_MEANINGS = {
    "aborted": "the client left",
    "cut off": "a fault took the decoder away",
    "open": "it had not ended",
}


@with_settings()
def sim(
    settings: Settings,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the history.", rich_help_panel=_SCENARIO)
    ] = 0,
    histories: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Run this many seeds.", rich_help_panel=_SCENARIO),
    ] = 1,
    nodes: Annotated[
        str,
        typer.Option(metavar="PxD", help="Prefillers and decoders.", rich_help_panel=_SCENARIO),
    ] = "2x1",
    requests: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Requests of a history.", rich_help_panel=_SCENARIO),
    ] = 20,
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Kinds of faults, with commas between; none for none.",
            show_default="all kinds",
            rich_help_panel=_SCENARIO,
        ),
    ] = None,
    fault_count: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Faults of a history.", rich_help_panel=_SCENARIO),
    ] = 5,
    only_requests: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Leave out all requests but these.",
            show_default=False,
            rich_help_panel=_SCENARIO,
        ),
    ] = None,
    only_faults: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Leave out all faults but these; none for none.",
            show_default=False,
            rich_help_panel=_SCENARIO,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each history.")
    ] = False,
) -> None:
    """Simulate a cluster: the real engine on a simulated network, with faults drawn from a seed."""
    from pdx.lab.sim.scenario import ScenarioOptions
    from pdx.lab.sim.search import few_collections

    num_prefillers, num_decoders = _parse_nodes(nodes)
    options = ScenarioOptions(
        num_prefillers=num_prefillers,
        num_decoders=num_decoders,
        num_requests=requests,
        num_faults=fault_count,
        faults=_parse_kinds(faults),
        only_requests=_parse_numbers("--only-requests", only_requests),
        only_faults=_parse_numbers("--only-faults", only_faults),
    )
    with few_collections():
        failed = _run(range(seed, seed + histories), options, as_json=as_json)
    if failed is not None:
        _report_failure(failed, options)
        raise typer.Exit(1)


def _run(seeds: range, options: ScenarioOptions, *, as_json: bool) -> Outcome | None:
    """Run histories until one fails; returns that one."""
    from pdx.lab.sim.search import run_history

    recorded = len(seeds) == 1 and options.num_requests <= 1000
    ends: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    cpu_s = virtual_s = 0.0
    done = 0
    failed = None
    for seed in seeds:
        outcome = run_history(seed, options, recorded=recorded)
        done += 1
        cpu_s, virtual_s = cpu_s + outcome.cpu_s, virtual_s + outcome.virtual_s
        ends.update(outcome.ends)
        errors.update(outcome.errors)
        if as_json:
            sys.stdout.write(json.dumps(_as_dict(outcome)) + "\n")
        elif recorded:
            sys.stdout.writelines(f"{line}\n" for line in outcome.lines)
        if outcome.broken is not None:
            failed = outcome
            break
        if not as_json and done % _PROGRESS_HISTORIES == 0 and done < len(seeds):
            status_line(f"{done} of {len(seeds)} histories, {cpu_s / done * 1e3:.1f} ms each")
    if not as_json:
        _print_summary(seeds[:done], ends, errors, cpu_s, virtual_s, failed)
    return failed


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    broken = outcome.broken
    return {
        "seed": outcome.seed,
        "broken": None if broken is None else broken.invariant,
        "detail": None if broken is None else broken.detail,
        "ends": outcome.ends,
        "errors": outcome.errors,
        "virtual_s": outcome.virtual_s,
        "cpu_s": outcome.cpu_s,
        "num_steps": outcome.num_steps,
        "counters": outcome.counters,
        "history": outcome.lines,
    }


def _print_summary(
    seeds: range,
    ends: Counter[str],
    errors: Counter[str],
    cpu_s: float,
    virtual_s: float,
    failed: Outcome | None,
) -> None:
    why = ", ".join(f"{count} x {error}" for error, count in sorted(errors.items()))
    meanings = _MEANINGS | ({"failed": f"the node answered with an error, {why}"} if why else {})
    told = [
        f"{count} {end}" + (f" ({meanings[end]})" if end in meanings else "")
        for end, count in sorted(ends.items(), reverse=True)
    ]
    lines = [
        f"histories  {len(seeds)}, {cpu_s / len(seeds) * 1e3:.1f} ms of CPU each",
        f"seeds      {seeds[0]} to {seeds[-1]}",
        f"virtual    {virtual_s:.1f} s",
        *(f"{'' if i else 'requests':<10} {text}" for i, text in enumerate(told)),
        f"invariants {'all hold' if failed is None else f'BROKEN: {failed.broken}'}",
    ]
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _report_failure(failed: Outcome, options: ScenarioOptions) -> None:
    from pdx.lab.sim.search import command_line, shrink

    assert failed.broken is not None
    status_line(f"seed {failed.seed} breaks {failed.broken}")
    smaller = shrink(failed.seed, options, failed.broken.invariant)
    status_line(f"to see it happen: {command_line(failed.seed, smaller)}")


def _parse_nodes(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(
            f"--nodes {text!r} is no number of nodes", hint="two prefillers, one decoder: 2x1"
        )
    return int(parts[0]), int(parts[1])


def _parse_kinds(text: str | None) -> tuple[FaultKind, ...]:
    from pdx.lab.sim.scenario import FaultKind

    if text is None or text == "none":
        return tuple(FaultKind) if text is None else ()
    known = {kind.value: kind for kind in FaultKind}
    for name in text.split(","):
        if name not in known:
            raise ConfigError(
                f"--faults: {name!r} is no kind of fault", hint=f"use {', '.join(known)}"
            )
    return tuple(known[name] for name in text.split(","))


def _parse_numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    if text is None or text == "none":
        return None if text is None else ()
    if not all(part.isdigit() for part in text.split(",")):
        raise ConfigError(f"{flag} {text!r} are no numbers", hint="such as 0,3,17")
    return tuple(map(int, text.split(",")))
