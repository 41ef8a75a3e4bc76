"""A prefiller and a decoder for tests that break them: what has died is started again."""

from __future__ import annotations

import itertools
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.oracle.transformers_oracle import Oracle
from tests.system.calls import Call
from tests.system.nodes import Decoder, Prefiller, decoder, prefiller, wait_until

__all__ = ["CHUNK", "LAYERS", "NUM_PAGES", "PAGE", "Cluster"]

#: Small chunks, so that a prompt takes many passes and can be stopped between two of them.
CHUNK, PAGE, LAYERS = 4, 16, 3
#: Of the decoder: one long prompt and a few short ones.
NUM_PAGES = 48
#: How long the prefiller's rank runs at a time while it is led into the middle of a transfer.
_SLICE_S = 0.003


class Cluster:
    """One prefiller and one decoder at a time."""

    def __init__(self, model: Path, logs: Path, provider: str) -> None:
        self.provider = provider
        self._model = model
        self._logs = logs
        self._stack = ExitStack()
        self._serial = itertools.count()
        self.prefiller = self.start_prefiller()
        self.decoder = self.start_decoder()

    def start_prefiller(self, listen: str = "127.0.0.1:0") -> Prefiller:
        """A new prefiller; the old one must be dead."""
        options = ["--fabric", self.provider, "--kv-memory", "16M", "--chunk", str(CHUNK)]
        node = prefiller(self._model, self._log("prefill"), "--listen", listen, *options)
        self.prefiller = self._stack.enter_context(node)
        return self.prefiller

    def start_decoder(self) -> Decoder:
        """A new decoder; the old one may live on."""
        options = ["--fabric", self.provider, "--pages", str(NUM_PAGES)]
        node = decoder(self.prefiller.address, self._log("decode"), *options)
        self.decoder = self._stack.enter_context(node)
        return self.decoder

    def heal(self) -> None:
        """Both nodes live, are connected and clean."""
        if self.prefiller.process.poll() is not None:
            self.start_prefiller(self.prefiller.address)
        if self.decoder.process.poll() is not None:
            self.start_decoder()
        self.decoder.wait_healthy()
        self.decoder.wait_clean()
        self.prefiller.wait_clean()

    def call_with_stopped_rank(self, prompt: list[int], max_tokens: int, **fields: Any) -> Call:
        """A request whose first pass has been sent to a rank that is stopped: nothing is written
        yet.
        """
        os.kill(self.prefiller.child("pdx.runner"), signal.SIGSTOP)
        call = self.decoder.call(prompt, max_tokens, **fields)
        self.prefiller.wait_status(
            lambda status: status["requests_active"] == 1, what="the prefiller begins"
        )
        return call

    def call_stopped_in_mid_transfer(
        self, prompt: list[int], max_tokens: int, **fields: Any
    ) -> Call:
        """A request of whose pages some are written and others not, with the prefiller's rank
        stopped.
        """
        rank = self.prefiller.child("pdx.runner")
        before = self.prefiller.status()["atoms_posted"]
        call = self.call_with_stopped_rank(prompt, max_tokens, **fields)

        def some_are_written() -> bool:
            os.kill(rank, signal.SIGCONT)
            time.sleep(_SLICE_S)
            os.kill(rank, signal.SIGSTOP)
            return self.prefiller.status()["atoms_posted"] >= before + LAYERS

        wait_until(some_are_written, timeout_s=10, what="the first page is written")
        atoms = -(-(len(prompt) - 1) // PAGE) * LAYERS
        assert self.prefiller.status()["atoms_posted"] < before + atoms, "all is written already"
        return call

    def resume_rank(self) -> None:
        """Let the prefiller's rank run."""
        os.kill(self.prefiller.child("pdx.runner"), signal.SIGCONT)

    def check_alive(self, oracle: Oracle, prompt: list[int]) -> None:
        """An ordinary request succeeds, and both nodes are clean afterwards."""
        assert oracle.greedy(prompt, 64).agrees_with(self.decoder.complete(prompt, 64))
        self.decoder.wait_clean()
        self.prefiller.wait_clean()

    def close(self) -> None:
        """Stop what runs."""
        self._stack.close()

    def _log(self, role: str) -> Path:
        return self._logs / f"{role}-{next(self._serial)}.log"
