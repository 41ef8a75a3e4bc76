"""Ten minutes of load on real nodes while processes are killed and clients leave: what went wrong.

Sixty kills (prefiller, decoder, a rank of either; started again) and 240 departures of clients,
spread over the time, each at a random moment. Every other answer must be the oracle's, token by
token; only who was asking a decoder while it died may fail. A violation is a wrong token, an error,
a hang, or a page that is not free at the end; the row counts them, and the bench fails with any.
`--toy`: two kills, four departures, and no row.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.rows import append_row
from tests.oracle.tiny_checkpoint import LLAMA, write_hub_layout
from tests.oracle.tiny_text import TEXT, build_tokenizer
from tests.oracle.transformers_oracle import Oracle
from tests.system.chaos import KINDS, Chaos


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, object], list[str]]:
    """Figures of a run, and its violations."""
    model = folder / "tiny-llama"
    write_hub_layout(LLAMA, model)
    victims = [KINDS[i % len(KINDS)] for i in range(arguments.kills)]
    random.Random(arguments.seed).shuffle(victims)
    chaos = Chaos(
        model,
        Oracle(model),
        build_tokenizer(puts_bos=True).encode(TEXT).ids,
        folder,
        fabric=arguments.fabric,
        num_prefillers=arguments.prefillers,
        seed=arguments.seed,
    )
    began_s = time.monotonic()
    with closing(chaos):
        chaos.run(
            victims,
            num_clients=arguments.clients,
            pause_s=arguments.seconds / arguments.kills,
            num_departures=arguments.departures,
        )
    counts = chaos.counts
    figures: dict[str, object] = {
        "fabric": arguments.fabric,
        "prefillers": arguments.prefillers,
        "clients": arguments.clients,
        "seed": arguments.seed,
        "seconds": f"{time.monotonic() - began_s:.0f}",
        **{
            f"killed_{kind.replace(chr(39), '').replace(' ', '_')}": counts[f"killed: {kind}"]
            for kind in KINDS
        },
        "departures": counts["left"],
        "answered": counts["answered"],
        "failed_with_their_decoder": counts["failed with their decoder"],
        "slowest_answer_s": f"{chaos.slowest_answer_s:.1f}",
        "violations": len(chaos.violations),
    }
    return figures, chaos.violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="two kills, no row")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--departures", type=int, default=240)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--prefillers", type=int, default=2)
    parser.add_argument("--fabric", default="auto", choices=("auto", "tcp", "shm"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.seconds, arguments.kills, arguments.departures = 4.0, 2, 4
    with tempfile.TemporaryDirectory(prefix="pdx-chaos-") as folder:
        figures, violations = measure(arguments, Path(folder))
    print(json.dumps(figures, indent=1))
    for violation in violations:
        print(f"VIOLATION {violation}")
    if not arguments.toy:
        append_row("chaos", figures)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
