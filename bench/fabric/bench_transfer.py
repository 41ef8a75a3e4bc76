"""`pdx bench transfer`'s rounds as rows: random pages, pdx beside memcpy, raw libfabric and peers.

One row for each system and page size: medians over the rounds, and what the median lies between
with 95 % confidence. `--toy`: one short round of memcpy and raw, no rows.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.rows import append_row
from pdx.errors import PdxError
from pdx.fabric import Provider
from pdx.lab.transfers.children import open_systems
from pdx.lab.transfers.figures import Figure, Interval
from pdx.lab.transfers.pattern import shared_memory
from pdx.lab.transfers.run import Plan, run_rounds
from pdx.lab.transfers.systems import PdxPair, System, local_receiver

SIZES = tuple(1 << shift for shift in (12, 14, 16, 18, 20, 22))
TOY_SIZES = (4096, 65536)


def measure(provider: Provider, arguments: argparse.Namespace) -> list[Figure]:
    """All systems on one provider."""
    plan = Plan(
        pool_bytes=(4 if arguments.toy else 256) << 20,
        page_sizes=TOY_SIZES if arguments.toy else arguments.sizes,
        batch_pages=4096,  # of a long prompt: Python takes as long for each batch as 50 pages do
        batch_bytes=64 << 20,
        layers=1,
        neighbours=1,
        seconds=0.01 if arguments.toy else arguments.seconds,
        rounds=1 if arguments.toy else arguments.rounds,
    )
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(shared_memory(plan.pool_bytes))
        channel, receiver = local_receiver(file=memory.target_fd)
        pair = PdxPair(
            channel,
            receiver,
            provider=provider,
            bind_hosts=(),
            pool_bytes=plan.pool_bytes,
            ahead=arguments.ahead,
            file=memory.source_fd,
        )
        stack.callback(pair.close)
        systems: list[System] = [pair]
        for name in ("memcpy", "raw") if arguments.toy else arguments.compare:
            for system in open_systems(
                name, provider, plan.pool_bytes, memory, arguments.peers_python
            ):
                stack.callback(system.close)
                systems.append(system)
        return run_rounds(plan, systems, lambda what: None, tell_failure).figures()


def tell_failure(name: str, error: PdxError) -> None:
    print(f"{name} is left out: {error.message}", file=sys.stderr)


def row(provider: str, ahead: int, figure: Figure) -> dict[str, object]:
    return {
        "provider": provider,
        "system": figure.system,
        "page_bytes": figure.page_bytes,
        "pdx_batches_in_flight": ahead,
        "rounds": figure.rounds,
        "gb_per_s": f"{figure.gb_per_s.median:.3f}",
        "gb_per_s_low": f"{figure.gb_per_s.low:.3f}",
        "gb_per_s_high": f"{figure.gb_per_s.high:.3f}",
        "us_per_page": f"{figure.us_per_atom:.3f}",
        "wrong_pages": figure.wrong,
        **columns("to_memcpy", figure.to_memcpy),
        **columns("to_better_raw", figure.to_raw),
        **columns("pdx_to_this", figure.pdx_to_this),
    }


def columns(name: str, interval: Interval | None) -> dict[str, str]:
    if interval is None:
        return {name: "", f"{name}_low": "", f"{name}_high": ""}
    return {
        name: f"{interval.median:.3f}",
        f"{name}_low": f"{interval.low:.3f}",
        f"{name}_high": f"{interval.high:.3f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--fabric", nargs="+", default=["tcp", "shm"], choices=["tcp", "shm"])
    parser.add_argument("--compare", nargs="*", default=["memcpy", "raw"])
    parser.add_argument("--peers-python", help="the Python that has nixl and mooncake")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.12)
    parser.add_argument("--ahead", type=int, default=1)
    arguments = parser.parse_args()
    arguments.sizes = tuple(arguments.sizes)
    for provider in arguments.fabric:
        for figure in measure(provider, arguments):
            figures = row(provider, arguments.ahead, figure)
            shown = ("provider", "system", "page_bytes", "gb_per_s", "to_better_raw", "pdx_to_this")
            print("  ".join(str(figures[name]) for name in shown), flush=True)
            if not arguments.toy:
                append_row("transfer", figures)


if __name__ == "__main__":
    main()
