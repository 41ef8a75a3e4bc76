"""The progress word: what is published is seen through another mapping, and wakes a reader."""

from __future__ import annotations

import mmap
import os
import select
import struct

from pdx.kernels.cpu.progress import ProgressWord


def test_published_value_is_seen_by_another_mapping_and_wakes_its_reader() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4096)
    eventfd = os.eventfd(0, os.EFD_NONBLOCK)
    ours, theirs = mmap.mmap(fd, 4096), mmap.mmap(fd, 4096)
    word = ProgressWord(ours, eventfd)
    try:
        assert select.select([eventfd], [], [], 0)[0] == []
        for value in (1, 5, 2**64 - 1):
            word.publish(value)
            assert struct.unpack_from("<Q", theirs)[0] == value == word.value
        assert select.select([eventfd], [], [], 0)[0] == [eventfd]
        assert os.eventfd_read(eventfd) == 3
    finally:
        os.close(eventfd)
        os.close(fd)


def test_reader_that_never_reads_does_not_stop_the_writer() -> None:
    eventfd = os.eventfd(0, os.EFD_NONBLOCK)
    os.eventfd_write(eventfd, 2**64 - 2)
    memory = mmap.mmap(-1, 4096)
    word = ProgressWord(memory, eventfd)
    try:
        word.publish(9)
        assert word.value == 9
    finally:
        os.close(eventfd)


def test_word_without_eventfd() -> None:
    word = ProgressWord(mmap.mmap(-1, 4096), -1)
    word.publish(3)
    assert word.value == 3
