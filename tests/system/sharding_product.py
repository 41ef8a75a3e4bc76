"""The full product of ranks, page sizes, chunks and prefix hits: `scripts/soak --sharding`.

Each pair of rank counts starts once: a decoder, and prefillers whose pages are like its own, larger
or smaller, with chunks that divide the page or not. Inside, every length is asked, and every state
of the prefix caches with every prefiller. Exit status 1 at the first that is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

from tests.oracle.transformers_oracle import Oracle
from tests.system.sharing import HOLDERS, PAGE, PROBES, Shape, cluster_of

TP_SIZES = (1, 2, 4)
#: Page size and chunk of each prefiller.
PREFILLERS = (
    (PAGE, 4 * PAGE),
    (PAGE, 27),
    (4 * PAGE, 4 * PAGE),
    (4 * PAGE, 27),
    (PAGE // 2, 27),
)


def run_pair(
    prefill_tp: int, decode_tp: int, model: Path, oracle: Oracle, prompt_ids: list[int], logs: Path
) -> int:
    """All states of one pair of rank counts; how many."""
    shapes = [
        Shape(tp_size=prefill_tp, page_size=page_size, chunk=chunk)
        for page_size, chunk in PREFILLERS
    ]
    with cluster_of(shapes, decode_tp, model, oracle, prompt_ids, logs) as cluster:
        cluster.check_lengths()
        states = list(itertools.product(range(len(shapes)), HOLDERS, PROBES))
        for idx, holder, probe in states:
            try:
                cluster.check_prefix(idx, holder, probe)
            except AssertionError as error:
                raise AssertionError(f"{shapes[idx]}, {holder}, {probe}: {error}") from error
        cluster.wait_clean()
    return len(states) + 1


def main() -> int:
    """The command."""
    from tests.oracle.tiny_checkpoint import LLAMA, write_hub_layout
    from tests.oracle.tiny_text import TEXT, build_tokenizer

    parser = argparse.ArgumentParser(prog="scripts/soak --sharding", description=__doc__)
    parser.add_argument("--prefill-tp", type=int, nargs="*", default=TP_SIZES, metavar="RANKS")
    parser.add_argument("--decode-tp", type=int, nargs="*", default=TP_SIZES, metavar="RANKS")
    asked = parser.parse_args()
    prompt_ids: list[int] = build_tokenizer(puts_bos=True).encode(TEXT).ids
    num_states = 0
    with tempfile.TemporaryDirectory(prefix="pdx-sharding-") as folder:
        model = Path(folder) / "tiny-llama"
        write_hub_layout(LLAMA, model)
        oracle = Oracle(model)
        for prefill_tp, decode_tp in itertools.product(asked.prefill_tp, asked.decode_tp):
            began_s = time.monotonic()
            logs = Path(folder) / f"{prefill_tp}-{decode_tp}"
            logs.mkdir()
            num = run_pair(prefill_tp, decode_tp, model, oracle, prompt_ids, logs)
            took_s = time.monotonic() - began_s
            print(f"tp {prefill_tp} to {decode_tp}: {num} states, {took_s:.0f} s", flush=True)
            num_states += num
    print(f"{num_states} states, all as they should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
