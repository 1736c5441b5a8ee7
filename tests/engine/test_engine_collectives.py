import functools
import json
import os
import signal
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from engine_group_worker import values
from engine_net import run_ranks

from edgemesh.engine.collectives import CollectiveTimeoutError, Deadline, Group, alone, parts, starts
from edgemesh.engine.local import LocalBackend, LocalHub
from edgemesh.engine.memory import Region
from edgemesh.engine.shared import SharedBackend, region_bytes

WORKER = Path(__file__).parent / "engine_group_worker.py"


class Ranks:
    """The rank processes of one group, and what they said."""

    def __init__(self, kind, size, where, fds=(), epoch=0):
        self.size = size
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), kind, str(size), where, str(epoch)],
            stdout=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def lines(self, count):
        """The next lines of ``count`` ranks, by rank."""
        said = [json.loads(self.process.stdout.readline()) for _ in range(count)]
        return sorted(said, key=itemgetter("rank"))

    def close(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def region():
    made = Region.create("test", 4096 + 2 * 3 * (1 << 14))
    yield made
    made.close()


@functools.cache
def reference(size):
    """What every rank must get, from the in-process backend."""
    hub = LocalHub("world", size)
    ends = [LocalBackend(hub, rank, Deadline()) for rank in range(size)]
    return run_ranks([functools.partial(values, end, rank, size) for rank, end in enumerate(ends)])


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_processes_get_the_same_bits_and_name_who_stays_away_or_dies(kind, region, tmp_path):
    where, fds = (f"{region.nbytes}:{region.fd}", (region.fd,)) if kind == "shm" else (str(tmp_path / "store"), ())
    ranks = Ranks(kind, 3, where, fds)
    try:
        said = ranks.lines(3)
        assert [each["values"] for each in said] == reference(3)
        for line in ranks.lines(2):
            assert (line["missing"], line["group"]) == ([2], "world")
            assert 1.9 <= line["took"] < 30
        os.kill(said[2]["pid"], signal.SIGKILL)
        for line in ranks.lines(2):
            assert line["missing"] == [2]
            assert line["took"] < 30
    finally:
        ranks.close()


def test_a_region_serves_the_next_epoch_as_it_was_left(region):
    for epoch in (0, 1):
        ranks = Ranks("shm", 2, f"{region.nbytes}:{region.fd}", (region.fd,), epoch)
        try:
            assert [each["values"] for each in ranks.lines(2)] == reference(2)
        finally:
            ranks.close()


def test_a_region_too_small_for_its_ranks_is_refused():
    with pytest.raises(ValueError, match="cannot share 4096 bytes"):
        SharedBackend("attn", 0, 2, torch.zeros(4096, dtype=torch.uint8), 0, Deadline())
    assert region_bytes(2) > 4096


def test_a_row_larger_than_a_slot_is_refused():
    end = SharedBackend("attn", 0, 2, torch.zeros(4096 + 4 * 64, dtype=torch.uint8), 0, Deadline())
    with pytest.raises(ValueError, match="row of 17 elements"):
        end.all_gather(torch.zeros(1, 17), [1, 1])


def test_a_late_thread_is_named():
    end = LocalBackend(LocalHub("attn", 3), 1, Deadline(1_000_000))
    with pytest.raises(CollectiveTimeoutError, match=r"'attn': rank\(s\) \[0, 2\]"):
        end.gather(torch.zeros(1))


def test_a_group_of_one_exchanges_and_copies_nothing():
    group = alone().attn
    x = torch.ones(3, 2)
    assert group.all_reduce(x) is x
    assert group.reduce_scatter(x, (3,)) is x
    assert group.all_gather(x, (3,)) is x
    assert group.gather(x).shape == (1, 3, 2)
    assert group.spent_ns == 0


def test_several_ranks_need_a_backend():
    with pytest.raises(ValueError, match="no way between them"):
        Group("world", 0, 2, None)


def test_rows_are_dealt_evenly():
    assert parts(7, 3) == (3, 2, 2)
    assert parts(2, 4) == (1, 1, 0, 0)
    assert starts((3, 0, 2)) == (0, 3, 3)


def test_what_was_gathered_is_no_window_into_shared_memory():
    """Also where it fills the slots exactly, and so lies there as it is asked for."""
    region = torch.zeros(4096 + 4 * 128, dtype=torch.uint8)
    ends = [SharedBackend("attn", rank, 2, region, 0, Deadline()) for rank in range(2)]

    def job(rank):
        found = ends[rank].all_gather(torch.full((2, 16), float(rank)), [2, 2])
        small = ends[rank].gather(torch.full((32,), float(rank)))
        for _ in range(4):
            ends[rank].gather(torch.full((32,), 9.0))
        return found.tolist(), small.tolist()

    wanted = ([[0.0] * 16] * 2 + [[1.0] * 16] * 2, [[0.0] * 32, [1.0] * 32])
    assert run_ranks([functools.partial(job, rank) for rank in range(2)]) == [wanted] * 2
