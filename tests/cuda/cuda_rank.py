"""A rank's process for the tests of what ranks share on cards; it writes one line of JSON for each thing it has done.

``lease RUN_DIR PLANE VALUE``: lease rank 0's memory, say what the KV's first page holds, fill it with VALUE, then hold it until stdin ends.
``nccl RANK SIZE STORE DEVICE``: meet the others, run every collective, capture some in a graph; the last rank then stays away.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore

from edgemesh.engine.collectives import CollectiveError, Collectives, Deadline, Group
from edgemesh.engine.cuda.nccl import NcclBackend, maker, settle
from edgemesh.engine.lease import lease
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Lease

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_group_worker import say, values


def hold(run_dir, plane, value):
    held = lease(Path(run_dir) / "sock" / "vault", Lease(f"rank-0.{plane}", 0, 0, Plane(plane)))
    kv = held.tensors["kv"]
    sums = {name: float(each.sum(dtype=torch.float64)) for name, each in held.tensors.items() if name != "kv"}
    found = float(kv[0, 0, 0].float().mean())
    torch.cuda.empty_cache()
    say(found=found, device=str(kv.device), sums=sums, free=torch.cuda.mem_get_info()[0])
    kv[:, :, 0] = float(value)
    torch.cuda.synchronize()
    say(filled=float(value))
    sys.stdin.read()


class OnCard:
    """A backend whose tensors come from the host and go back there."""

    def __init__(self, end):
        self.end = end

    def all_reduce(self, x):
        return self.end.all_reduce(x.cuda()).cpu()

    def reduce_scatter(self, x, counts):
        return self.end.reduce_scatter(x.cuda(), counts).cpu()

    def all_gather(self, x, counts):
        return self.end.all_gather(x.cuda(), counts).cpu()

    def gather(self, x):
        return self.end.gather(x.cuda()).cpu()


def graphed(end, rank, size):
    """Three collectives replayed over fresh inputs: the difference from what they must give."""
    rows, shares = 8, [5, *[3] * (size - 1)]
    x = torch.zeros((size * rows, 64), device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = step(end, x, [rows] * size, shares)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out = step(end, x, [rows] * size, shares)
        worst = 0.0
        for turn in range(20):
            x.fill_(turn + rank)
            graph.replay()
            stream.synchronize()
            total = size * turn + size * (size - 1) / 2
            worst = max(worst, *((each - total).abs().max().item() for each in out))
    return worst


def step(end, x, even, ragged):
    part = end.reduce_scatter(x, even)
    uneven = end.reduce_scatter(x[: sum(ragged)], ragged)
    return end.all_gather(part, even), end.all_gather(uneven, ragged), end.all_reduce(x * 1.0)


def timed(end, nbytes):
    """Microseconds of an all-reduce."""
    x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        end.all_reduce(x)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        end.all_reduce(x)
    stop.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(stop) * 100, 1)


def meet(rank, size, path, device):
    torch.cuda.set_device(device)
    deadline = Deadline(120_000_000_000)
    store = PrefixStore("0-decode-0", FileStore(path, size))
    began = time.monotonic()
    make = maker(Plane.DECODE, {"world": "world", "attn": "attn-0"}, store, deadline)
    world = make("world", rank, size)
    assert isinstance(world, NcclBackend)
    say(rank=rank, values=values(OnCard(world), rank, size), took=time.monotonic() - began)
    say(rank=rank, graphed=graphed(world, rank, size))
    say(rank=rank, us={nbytes: timed(world, nbytes) for nbytes in (1 << 14, 1 << 20, 1 << 24)})
    if rank == size - 1:
        sys.stdin.read()
        return
    group = Group("world", rank, size, world)
    deadline.allow(1_000_000_000)
    began = time.monotonic()
    group.all_reduce(torch.ones(1000, device="cuda"))
    event = torch.cuda.Event()
    event.record()
    try:
        settle(event, Collectives(group, group, deadline))
    except CollectiveError as error:
        say(rank=rank, error=str(error), missing=error.missing, took=time.monotonic() - began)
    torch.cuda.synchronize()
    say(rank=rank, free_again=True)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "lease":
        hold(*rest)
    else:
        meet(int(rest[0]), int(rest[1]), rest[2], int(rest[3]))
    os._exit(0)  # what NCCL and the driver do at a process's end is not what is tried here
