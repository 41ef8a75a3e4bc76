"""Real nodes under load whose processes are killed at random: `scripts/soak --chaos`, and a short
run of it among the tests.

Clients ask without a pause, and some of them leave. Each answer must be the oracle's, in time; only
a request that was under way while its own decoder died may fail. Whatever is killed is started
again. At the end every page is free on every node.
"""

from __future__ import annotations

import argparse
import http.client
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.oracle.transformers_oracle import Continuation, Oracle
from tests.system.calls import Call
from tests.system.nodes import Decoder, Prefiller, decoder, prefiller, wait_until
from tests.system.prompts import prompt_of

__all__ = ["KINDS", "Chaos"]

KINDS = ("prefiller", "prefiller's rank", "decoder", "decoder's rank")

_LENGTHS = (1, 2, 16, 17, 40, 100, 200, 300)
_LEAVES = 0.25
#: A node that starts, on a machine that is busy.
_HEAL_S = 60.0
_MODEL_SETTINGS = ("--kv-memory", "16M", "--chunk", "16")


class Chaos:
    """Owns the nodes; ``violations`` says what must not have happened."""

    def __init__(
        self,
        model: Path,
        oracle: Oracle,
        prompt_ids: list[int],
        logs: Path,
        *,
        fabric: str,
        num_prefillers: int,
        seed: int,
    ) -> None:
        self._model, self._logs, self._fabric = model, logs, fabric
        self._dice = random.Random(seed)
        self._seed = seed
        self._stack = ExitStack()
        self._num_starts = 0
        self._pool: list[tuple[list[int], Continuation]] = []
        for i, length in enumerate(_LENGTHS):
            prompt = prompt_of(prompt_ids, length, shift=i)
            self._pool.append((prompt, oracle.greedy(prompt, 8 + 6 * i)))
        self._prefillers = [self._start_prefiller("127.0.0.1:0") for _ in range(num_prefillers)]
        self._decoder = self._start_decoder("127.0.0.1:0")
        #: Guards what clients read of the decoder's life.
        self._num_deaths = 0
        self._is_up = True
        self._stop = threading.Event()
        #: When clients are to leave (time.monotonic()), where that is planned; the last is next.
        self._departures: list[float] | None = None
        self._departures_lock = threading.Lock()
        self.slowest_answer_s = 0.0
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    def run(
        self,
        victims: list[str],
        *,
        num_clients: int,
        pause_s: float,
        num_departures: int | None = None,
    ) -> None:
        """Kill these, one at a random moment of each ``pause_s`` seconds of load, or later where
        nodes take longer to be back.

        Args:
            victims: of KINDS.
            num_departures: so many clients leave, spread over the time; None: each fourth.
        """
        began_s, total_s = time.monotonic(), pause_s * len(victims)
        if num_departures is not None:
            step_s = total_s / num_departures
            self._departures = [began_s + i * step_s for i in reversed(range(num_departures))]
        clients = [
            threading.Thread(target=self._ask_on, args=(i,), name=f"client-{i}", daemon=True)
            for i in range(num_clients)
        ]
        for client in clients:
            client.start()
        try:
            for i, victim in enumerate(victims):
                moment_s = began_s + (i + self._dice.uniform(0.1, 0.9)) * pause_s
                time.sleep(max(0.2, moment_s - time.monotonic()))  # the moment is the point
                self._kill(victim)
                self._heal()
                if self.violations:
                    break
            time.sleep(max(0.5, began_s + total_s - time.monotonic()))
            if self._departures is not None and not self.violations:
                wait_until(lambda: not self._departures, timeout_s=60, what="all have left")
        finally:
            self._stop.set()
            for client in clients:
                client.join(timeout=60)
                if client.is_alive():
                    self.violations.append(f"{client.name} hangs")
        for prompt, wanted in self._pool:
            if not wanted.agrees_with(self._decoder.complete(prompt, len(wanted.token_ids))):
                self.violations.append(f"wrong tokens after all, prompt of {len(prompt)}")
        for node in (self._decoder, *self._prefillers):
            try:
                node.wait_clean(10.0)
            except AssertionError as error:
                self.violations.append(f"pages are not free: {error}")

    def close(self) -> None:
        """Stop all nodes."""
        self._stack.close()

    # ---- nodes ----------------------------------------------------------------------------

    def _kill(self, victim: str) -> None:
        self.counts[f"killed: {victim}"] += 1
        of_decoder = victim.startswith("decoder")
        node = self._decoder if of_decoder else self._dice.choice(self._prefillers)
        if of_decoder:
            self._is_up = False
            self._num_deaths += 1
        if victim.endswith("rank"):
            node.signal_child("pdx.runner", signal.SIGKILL)
            assert node.process.wait(timeout=20) == 1, node.stderr()
        else:
            node.kill()

    def _heal(self) -> None:
        for i, node in enumerate(self._prefillers):
            if node.process.poll() is not None:
                self._prefillers[i] = self._start_prefiller(node.address)
        if self._decoder.process.poll() is not None:
            address = self._decoder.url.removeprefix("http://").removesuffix("/v1")
            self._decoder = self._start_decoder(address)
            self._is_up = True
        wait_until(
            lambda: self._decoder.counts()["prefillers"] == len(self._prefillers),
            timeout_s=_HEAL_S,
            what="all nodes are connected again",
        )

    def _start_prefiller(self, listen: str) -> Prefiller:
        options = ["--listen", listen, "--fabric", self._fabric, *_MODEL_SETTINGS]
        return self._stack.enter_context(prefiller(self._model, self._log(), *options))

    def _start_decoder(self, http_address: str) -> Decoder:
        peers = ",".join(node.address for node in self._prefillers)
        options = ["--http", http_address, "--fabric", self._fabric, *_MODEL_SETTINGS]
        return self._stack.enter_context(decoder(peers, self._log(), *options))

    def _log(self) -> Path:
        self._num_starts += 1
        return self._logs / f"node-{self._num_starts}.log"

    # ---- clients --------------------------------------------------------------------------

    def _ask_on(self, idx: int) -> None:
        dice = random.Random(f"{self._seed} {idx}")
        while not self._stop.is_set():
            if not self._is_up:
                self._stop.wait(0.05)
                continue
            num_deaths = self._num_deaths
            prompt, wanted = dice.choice(self._pool)
            leaves_after = dice.uniform(0, 0.3) if self._is_to_leave(dice) else None
            began_s = time.monotonic()
            problem = self._ask(prompt, wanted, dice.random() < 0.5, leaves_after)
            if problem is None:
                if leaves_after is None:
                    took_s = time.monotonic() - began_s
                    self.slowest_answer_s = max(self.slowest_answer_s, took_s)
                continue
            if leaves_after is not None:
                self._leave_again()
            decoder_died = num_deaths != self._num_deaths
            if decoder_died and not problem.startswith("wrong"):
                self.counts["failed with their decoder"] += 1
                continue
            took_s = time.monotonic() - began_s
            self.violations.append(f"prompt of {len(prompt)}, after {took_s:.1f} s: {problem}")

    def _is_to_leave(self, dice: random.Random) -> bool:
        if self._departures is None:
            return dice.random() < _LEAVES
        with self._departures_lock:
            if self._departures and self._departures[-1] <= time.monotonic():
                self._departures.pop()
                return True
        return False

    def _leave_again(self) -> None:
        """The decoder died before the client could leave: another one does."""
        if self._departures is not None:
            with self._departures_lock:
                self._departures.append(time.monotonic())

    def _ask(
        self, prompt: list[int], wanted: Continuation, stream: bool, leaves_after: float | None
    ) -> str | None:
        """What is wrong with the answer."""
        fields: dict[str, Any] = {} if self._dice.random() < 0.5 else {"cache_salt": "one"}
        try:
            call: Call = self._decoder.call(prompt, len(wanted.token_ids), stream=stream, **fields)
            if leaves_after is not None:
                self._stop.wait(leaves_after)
                call.leave()
                self.counts["left"] += 1
                return None
            status, body = call.answer()
        except (OSError, http.client.HTTPException, ValueError, AssertionError) as error:
            return f"no answer: {error!r}"
        if status != 200:
            return f"status {status}: {body}"
        chunks = body if isinstance(body, list) else [body]
        if any("error" in chunk for chunk in chunks):
            return f"an error in the stream: {chunks[-1]}"
        found = [t for c in chunks for choice in c["choices"] for t in choice["token_ids"]]
        if len(found) != len(wanted.token_ids) or not wanted.agrees_with(found):
            return f"wrong tokens: {found}, not {wanted.token_ids}"
        self.counts["answered"] += 1
        return None


def main() -> int:
    """The long run."""
    from tests.oracle.tiny_checkpoint import LLAMA, write_hub_layout
    from tests.oracle.tiny_text import TEXT, build_tokenizer

    parser = argparse.ArgumentParser(prog="scripts/soak --chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds of load between kills")
    parser.add_argument("--prefillers", type=int, default=2)
    parser.add_argument("--fabric", default="auto", choices=("auto", "tcp", "shm"))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    dice = random.Random(asked.seed)
    victims = [dice.choice(KINDS) for _ in range(asked.kills)]
    prompt_ids: list[int] = build_tokenizer(puts_bos=True).encode(TEXT).ids
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pdx-chaos-") as folder:
        model = Path(folder) / "tiny-llama"
        write_hub_layout(LLAMA, model)
        chaos = Chaos(
            model,
            Oracle(model),
            prompt_ids,
            Path(folder),
            fabric=asked.fabric,
            num_prefillers=asked.prefillers,
            seed=asked.seed,
        )
        try:
            chaos.run(victims, num_clients=asked.clients, pause_s=asked.pause)
        finally:
            chaos.close()
            print(f"{time.monotonic() - began_s:.0f} s, seed {asked.seed}")
            for name, count in sorted(chaos.counts.items()):
                print(f"  {name:<28} {count}")
            for violation in chaos.violations:
                print(f"VIOLATION {violation}")
    return 1 if chaos.violations else 0


if __name__ == "__main__":
    sys.exit(main())
