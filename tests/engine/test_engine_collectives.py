import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_net import run_ranks

from edgemesh.engine.collectives import CollectiveTimeoutError, Deadline, Group, alone, parts, starts
from edgemesh.engine.local import LocalBackend, LocalHub
from edgemesh.engine.memory import Region
from edgemesh.engine.shared import SharedBackend, region_bytes

WORKER = Path(__file__).parent / "engine_group_worker.py"


@pytest.fixture
def launch(tmp_path):
    """Start the ranks of one group; every process is gone at the end."""
    running = []
    regions = []

    def start(kind, job, size, *, slot_bytes=1 << 14, region=None, epoch=0):
        where = str(tmp_path / "store")
        fds = ()
        if kind == "shm":
            if region is None:
                region = Region.create("test", 4096 + 2 * size * slot_bytes)
                regions.append(region)
            where, fds = f"{region.nbytes}:{region.fd}", (region.fd,)
        for rank in range(size):
            process = subprocess.Popen(
                [sys.executable, str(WORKER), kind, job, str(rank), str(size), where, str(epoch)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=fds,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            running.append(process)
        return running[-size:]

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    for region in regions:
        region.close()


def outcome(process):
    assert process.stdout.readline() == "met\n"
    return json.loads(process.stdout.readline())


@functools.cache
def reference(size):
    """What every rank must get, from the in-process backend."""
    from engine_group_worker import values

    hub = LocalHub("world", size)
    ends = [LocalBackend(hub, rank, Deadline()) for rank in range(size)]
    return run_ranks([functools.partial(values, end, rank, size) for rank, end in enumerate(ends)])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_processes_get_the_bits_of_the_in_process_backend(launch, kind, size):
    found = [outcome(process)["values"] for process in launch(kind, "values", size)]
    assert found == reference(size)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_a_rank_that_stays_away_is_named_at_the_deadline(launch, kind):
    processes = launch(kind, "wait", 3)
    for process in processes[:2]:
        result = outcome(process)
        assert result["missing"] == [2]
        assert result["group"] == "world"
        assert 0.9 <= result["took"] < 5


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_a_killed_rank_is_named_within_the_bound(launch, kind):
    processes = launch(kind, "wait", 3)
    assert processes[2].stdout.readline() == "met\n"
    processes[2].kill()
    for process in processes[:2]:
        result = outcome(process)
        assert result["missing"] == [2]
        assert result["took"] < 5


def test_a_region_serves_the_next_epoch_as_it_was_left(launch):
    region = Region.create("epochs", 4096 + 2 * 2 * (1 << 14))
    try:
        for epoch in (0, 1):
            found = [outcome(each)["values"] for each in launch("shm", "values", 2, region=region, epoch=epoch)]
            assert found == reference(2)
    finally:
        region.close()


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
