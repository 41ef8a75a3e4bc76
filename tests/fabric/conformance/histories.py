"""A writer and a receiver in a simulated room, driven by commands, with a model beside them.

What is true at every moment is checked after every callback of the clock: see ``_check``, and
``_on_landing`` for each landing. Each transfer writes pages of its own, so that a landing tells
whose it is; a pair is used again as design allows: when its count is proved complete, or after the
fence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdx.fabric import (
    Arrived,
    FabricOptions,
    Fenced,
    LinkDown,
    LinkUp,
    PageBatch,
    Provider,
    Surplus,
    TransferDone,
)
from pdx.lab.simulated_fabric import Conditions, ImmLayout, Landing, WriteShape
from tests.fabric.conformance.simulated_pair import SimulatedPair, SimulatedSide

__all__ = ["COMMANDS", "World"]

PAGE, LAYERS, PAGES_EACH, MAX_TRANSFERS = 16, 3, 4, 48
SPOILED = 0xEE
ATOMS_EACH = LAYERS * PAGES_EACH
LAYER_BYTES = MAX_TRANSFERS * PAGES_EACH * PAGE
NUM_BYTES = LAYERS * LAYER_BYTES
LAYOUT = ImmLayout(slot_bits=2, generation_bits=2)

#: Some come more often than others.
COMMANDS = [
    *(["start"] * 6 + ["write"] * 3 + ["arm"] * 4 + ["progress"] * 4 + ["seal"] * 4),
    *("cancel", "release_early", "release_arrived", "release_arrived", "complete_drained"),
    *(["advance"] * 7 + ["long_advance", "fence_receiver", "fence_writer"] + ["relink"] * 3),
    *("pause", "resume", "resume", "partition", "mend", "mend", "reset", "slow"),
]


@dataclass
class Job:
    """A transfer on both sides."""

    index: int
    transfer: int
    writer_link: int
    receiver_link: int
    pair: tuple[int, int]
    given: int = 0
    sealed: bool = False
    cancelled: bool = False
    done: TransferDone | None = None
    armed_here: bool = True
    target: int = ATOMS_EACH
    arrived: bool = False
    #: Its pair may be used again.
    settled: bool = False
    landed: dict[int, int] = field(default_factory=dict)
    #: The progress value that an armed atom waits for, by its place.
    due: dict[int, int] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        return not self.sealed and not self.cancelled and self.done is None


class World:
    """See the module."""

    def __init__(self, seed: int, provider: Provider) -> None:
        self.provider = provider
        self.room = SimulatedPair(
            seed,
            provider,
            NUM_BYTES,
            FabricOptions(beat_interval_s=0.05, beat_timeout_s=0.4, connect_timeout_s=1.0),
            domains=(1 + seed % 3, 1 + seed // 3 % 3) if provider == "tcp" else (1, 1),
            # Slow enough for fences to find something in flight.
            conditions=Conditions(refusal_rate=0.05, wire_ns=(2_000, 2_000_000)),
            imm_layout=LAYOUT,
            write_shape=WriteShape(max_atoms=5, max_pieces=2),
        )
        self.writer: SimulatedSide = self.room.here
        self.receiver: SimulatedSide = self.room.there
        self.room.network.on_landing = self._on_landing
        self.writer.fill(seed)
        self.original = self.writer.memory.copy()
        self.jobs: list[Job] = []
        self.by_transfer: dict[int, Job] = {}
        self.history: list[tuple[int, str, str]] = []
        self.fenced: dict[str, set[int]] = {"writer": set(), "receiver": set()}
        self.ended: dict[str, set[int]] = {"writer": set(), "receiver": set()}
        self.told_down: set[tuple[str, int]] = set()
        self.told_up: set[tuple[str, int]] = set()
        self.progress_value = 0
        self.links: dict[str, int] = {}
        self.relink(seed)

    # ---- commands -------------------------------------------------------------------------------

    def run(self, commands: list[tuple[str, int]]) -> None:
        for name, number in commands:
            getattr(self, name)(number)
            self._step()

    def relink(self, number: int) -> None:
        """A fresh link on both sides, after the old one's end."""
        if self.links and not (self._is_ended("writer") and self._is_ended("receiver")):
            return
        window = 2 + number % 6
        self.links["writer"], ours = self.writer.open_link(window=window)
        self.links["receiver"], theirs = self.receiver.open_link(window=window)
        self.writer.fabric.connect(self.links["writer"], theirs)
        self.receiver.fabric.connect(self.links["receiver"], ours)
        if number % 4:
            self._advance(10_000_000)

    def start(self, number: int) -> None:
        """Arm a free pair and open a transfer to it."""
        used = {job.pair for job in self.jobs if not job.settled}
        busy = {job.pair[0] for job in self.jobs if job.armed_here}
        free = [
            (slot, generation)
            for slot in range(1, LAYOUT.max_slot + 1)
            for generation in range(LAYOUT.max_generation + 1)
            if slot not in busy and (slot, generation) not in used
        ]
        if not free or len(self.jobs) == MAX_TRANSFERS:
            return
        if self._is_ended("writer") or self._is_ended("receiver"):
            return
        pair = free[number % len(free)]
        self.receiver.fabric.expect(self.links["receiver"], *pair, ATOMS_EACH)
        transfer = self.writer.fabric.open_transfer(self.links["writer"], *pair)
        job = Job(len(self.jobs), transfer, self.links["writer"], self.links["receiver"], pair)
        self.jobs.append(job)
        self.by_transfer[transfer] = job

    def write(self, number: int) -> None:
        self._give(number, first_value=None)

    def arm(self, number: int) -> None:
        self._give(number, first_value=self.progress_value + number % 4)

    def progress(self, number: int) -> None:
        self.progress_value += 1 + number % 3
        self.writer.progress(self.progress_value)

    def seal(self, number: int) -> None:
        job = self._pick([j for j in self.jobs if j.open], number)
        if job is not None:
            job.sealed = True
            self.writer.fabric.seal(job.transfer)

    def cancel(self, number: int) -> None:
        job = self._pick([j for j in self.jobs if j.done is None], number)
        if job is not None:
            job.cancelled = True
            self.writer.fabric.cancel(job.transfer)

    def release_early(self, number: int) -> None:
        """What comes later is stale; the pair is not used again before the fence."""
        job = self._pick([j for j in self.jobs if j.armed_here and not j.arrived], number)
        if job is not None:
            job.armed_here = False
            self.receiver.fabric.release(*job.pair)

    def release_arrived(self, number: int) -> None:
        """The count is complete, which proves that nothing more comes: the pair is free at once."""
        job = self._pick([j for j in self.jobs if j.armed_here and j.arrived], number)
        if job is not None:
            job.armed_here = False
            self.receiver.fabric.release(*job.pair)
            job.settled = True

    def complete_drained(self, number: int) -> None:
        """The writer's end was told: wait for what it posted, if none failed."""
        drained = [j for j in self.jobs if j.armed_here and j.done and not j.done.failed_atoms]
        job = self._pick(drained, number)
        if job is not None and job.done is not None:
            job.target = job.target if job.arrived else job.done.posted_atoms
            self.receiver.fabric.retarget(*job.pair, job.target)

    def advance(self, number: int) -> None:
        self._advance((1 + number % 50) * 10_000)

    def long_advance(self, number: int) -> None:
        self._advance((1 + number % 10) * 100_000_000)

    def fence_writer(self, number: int) -> None:
        self.ended["writer"].add(self.links["writer"])
        self.writer.fabric.fence(self.links["writer"])

    def fence_receiver(self, number: int) -> None:
        self.ended["receiver"].add(self.links["receiver"])
        self.receiver.fabric.fence(self.links["receiver"])

    def pause(self, number: int) -> None:
        (self.writer, self.receiver)[number % 2].stop()

    def resume(self, number: int) -> None:
        self.writer.resume()
        self.receiver.resume()

    def partition(self, number: int) -> None:
        self.room.network.cut(*self._ends(number))

    def mend(self, number: int) -> None:
        self.room.network.mend(self.writer.name, self.receiver.name)

    def reset(self, number: int) -> None:
        self.room.network.reset(*self._ends(number))

    def slow(self, number: int) -> None:
        self.room.network.slow(*self._ends(number), 1.0 + number % 40)

    # ---- the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Heal everything, fence both sides, and look at what is left."""
        self.mend(0)
        self.resume(0)
        self.fence_writer(0)
        self.fence_receiver(0)
        self._advance(5_000_000_000)
        for job in self.jobs:
            assert job.done is not None, f"no end of {job}"
            self._check_arrival(job)
        assert self.fenced == self.ended
        expected = np.zeros(NUM_BYTES, np.uint8)
        for job in self.jobs:
            for offset in job.landed:
                expected[offset : offset + PAGE] = self.original[offset : offset + PAGE]
        assert np.array_equal(self.receiver.memory, expected)
        for side in (self.writer, self.receiver):
            side.fabric.unregister(side.region)

    # ---- what must hold -------------------------------------------------------------------------

    def _on_landing(self, landing: Landing) -> None:
        assert landing.target_link not in self.fenced["receiver"], "landed after Fenced"
        imm = LAYOUT.decode(landing.imm)
        atoms = 0
        for piece in landing.write.pieces:
            for offset in range(piece.dst_offset, piece.dst_offset + piece.num_bytes, PAGE):
                job = self.jobs[offset % LAYER_BYTES // (PAGES_EACH * PAGE)]
                assert job.pair == (imm.slot, imm.generation)
                assert job.receiver_link == landing.target_link
                assert offset not in job.landed, "an atom landed twice"
                assert self.progress_value >= job.due.get(offset, 0), "posted before it was due"
                job.landed[offset] = self.room.now_ns()
                atoms += 1
        assert atoms == imm.atoms

    def _step(self) -> None:
        for name, side in (("writer", self.writer), ("receiver", self.receiver)):
            for event in side.fabric.events():
                self._on_event(name, side, event)
        for job in self.jobs:
            if job.armed_here:
                count = self.receiver.fabric.count(*job.pair)
                assert count <= len(job.landed), "counted what has not landed"

    def _on_event(self, name: str, side: SimulatedSide, event: Any) -> None:
        self.history.append((self.room.now_ns(), name, repr(event)))
        match event:
            case LinkUp(link=link):
                assert (name, link) not in self.told_up | self.told_down
                self.told_up.add((name, link))
            case LinkDown(link=link):
                assert (name, link) not in self.told_down
                self.told_down.add((name, link))
            case Fenced(link=link):
                self._on_fenced(name, link)
            case TransferDone():
                self._on_done(event)
            case Arrived():
                job = self._armed(event.slot, event.generation)
                assert not job.arrived
                assert job.receiver_link not in self.ended["receiver"], "counted after the fence"
                assert event.atoms == job.target
                assert len(job.landed) >= event.atoms
                job.arrived = True
            case Surplus():
                raise AssertionError("nobody posted more than was expected")

    def _on_done(self, done: TransferDone) -> None:
        job = self.by_transfer[done.transfer]
        assert job.done is None, "two ends"
        job.done = done
        assert done.failed_atoms <= done.posted_atoms <= job.given
        assert len(job.landed) <= done.posted_atoms
        if self.provider == "shm":  # where a completion follows the data
            assert len(job.landed) >= done.posted_atoms - done.failed_atoms
        if not done.failed and not done.cancelled:
            assert job.sealed
            assert done.posted_atoms == job.given
        if not done.failed:
            self._spoil(job)

    def _on_fenced(self, name: str, link: int) -> None:
        assert link in self.ended[name]
        assert link not in self.fenced[name], "fenced twice"
        self.fenced[name].add(link)
        for job in self.jobs:
            if name == "writer" and job.writer_link == link:
                assert job.done is not None, "Fenced came before the end of a transfer"
                self._spoil(job)
            if name == "receiver" and job.receiver_link == link:
                if job.armed_here:
                    self._check_arrival(job)
                    job.armed_here = False
                    self.receiver.fabric.release(*job.pair)
                job.settled = True

    def _check_arrival(self, job: Job) -> None:
        if job.armed_here and job.receiver_link not in self.ended["receiver"]:
            count = self.receiver.fabric.count(*job.pair)
            assert job.arrived == (count == job.target)

    def _spoil(self, job: Job) -> None:
        """The source pages are free for other use: a later read of them would show."""
        for page in self._pages(job):
            for layer in range(LAYERS):
                start = layer * LAYER_BYTES + int(page) * PAGE
                self.writer.memory[start : start + PAGE] = SPOILED

    # ---- helpers --------------------------------------------------------------------------------

    def _give(self, number: int, *, first_value: int | None) -> None:
        able = [j for j in self.jobs if j.open and j.given < ATOMS_EACH]
        job = self._pick(able, number)
        if job is None:
            return
        half = PAGES_EACH // 2
        pages = self._pages(job)[:half] if job.given == 0 else self._pages(job)[half:]
        order = pages if number % 2 else pages[::-1].copy()
        batch = PageBatch(
            src_pages=order,
            dst_pages=order,
            page_bytes=PAGE,
            num_layers=LAYERS,
            src_layer_stride=LAYER_BYTES,
            dst_layer_stride=LAYER_BYTES,
        )
        job.given += batch.num_atoms
        if first_value is None:
            self.writer.fabric.write(job.transfer, batch)
        else:
            for layer in range(LAYERS):
                for page in order.tolist():
                    job.due[layer * LAYER_BYTES + page * PAGE] = first_value + layer
            self.writer.arm(job.transfer, batch, first_value)

    def _pages(self, job: Job) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.arange(PAGES_EACH, dtype=np.uint32) + np.uint32(job.index * PAGES_EACH)

    def _armed(self, slot: int, generation: int) -> Job:
        found = [j for j in self.jobs if j.armed_here and j.pair == (slot, generation)]
        assert len(found) == 1
        return found[0]

    def _pick(self, jobs: list[Job], number: int) -> Job | None:
        return jobs[number % len(jobs)] if jobs else None

    def _is_ended(self, name: str) -> bool:
        return self.links[name] in self.ended[name]

    def _ends(self, number: int) -> tuple[str, str]:
        names = (self.writer.name, self.receiver.name)
        return names if number % 2 else names[::-1]

    def _advance(self, duration_ns: int) -> None:
        def step() -> bool:
            self._step()
            return False

        self.room.clock.run_until(step, duration_ns)
