"""The progress word: what is published is seen through another mapping, and wakes a reader."""

from __future__ import annotations

import mmap
import os
import select
import struct

import pytest
import torch

from pdx.kernels.cpu.progress import publish
from pdx.runner.progress import Progress

CPU = torch.device("cpu")


def word_of(memory: mmap.mmap) -> int:
    word: int = struct.unpack_from("<Q", memory)[0]
    return word


@pytest.mark.parametrize("base", [0, 2**63 - 10])
def test_published_value_is_seen_by_another_mapping_and_wakes_its_reader(base: int) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4096)
    eventfd = os.eventfd(0, os.EFD_NONBLOCK)
    ours, theirs = mmap.mmap(fd, 4096), mmap.mmap(fd, 4096)
    progress = Progress(ours, eventfd, CPU, publish)
    progress.begin(torch.tensor([base]))
    try:
        assert select.select([eventfd], [], [], 0)[0] == []
        for step in (1, 5, 9):
            progress.publish(step)
            assert word_of(theirs) == base + step
        assert select.select([eventfd], [], [], 0)[0] == [eventfd]
        assert os.eventfd_read(eventfd) == 3
    finally:
        os.close(eventfd)
        os.close(fd)


def test_reader_that_never_reads_does_not_stop_the_writer() -> None:
    eventfd = os.eventfd(0, os.EFD_NONBLOCK)
    os.eventfd_write(eventfd, 2**64 - 2)
    memory = mmap.mmap(-1, 4096)
    progress = Progress(memory, eventfd, CPU, publish)
    try:
        progress.publish(9)
        assert word_of(memory) == 9
    finally:
        os.close(eventfd)


def test_word_without_eventfd() -> None:
    memory = mmap.mmap(-1, 4096)
    Progress(memory, -1, CPU, publish).publish(3)
    assert word_of(memory) == 3
