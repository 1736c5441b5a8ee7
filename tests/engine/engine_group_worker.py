"""The rank processes of the collectives' tests: one interpreter that loads torch once and forks a process per rank.

Every rank writes lines of JSON to standard output: ``{"rank", "pid"}`` once all have met; its ``values``, of every operation; and for
each collective that failed what was ``missing`` and how long it ``took``. The last rank then stays away, until it is killed.
"""

import json
import os
import sys
import time

import torch
from torch._C._distributed_c10d import FileStore

from edgemesh.engine.collectives import CollectiveTimeoutError, Deadline
from edgemesh.engine.gloo import GlooBackend
from edgemesh.engine.memory import Region
from edgemesh.engine.shared import SharedBackend

WAITS_NS = (2_000_000_000, 5_000_000_000)
"""Longer than a rank of a busy machine comes after another."""


def backend(kind, rank, size, where, epoch, deadline):
    if kind == "gloo":
        return GlooBackend("world", rank, size, FileStore(where, size), "127.0.0.1", deadline)
    nbytes, fd = (int(part) for part in where.split(":"))
    region = Region.adopt(fd, nbytes).tensor(0, torch.uint8, (nbytes,))
    return SharedBackend("world", rank, size, region, epoch, deadline)


def tensor(rank, rows, dtype):
    return torch.randn((rows, 7), generator=torch.Generator().manual_seed(1000 + rank)).to(dtype)


def values(end, rank, size):
    """Every operation on even, ragged, empty and large inputs: a checksum over the bits, and the shape."""
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        for counts in (
            [3] * size,
            list(range(size)),
            [0] * (size - 1) + [5],
            [4000 + each for each in range(size)],
            [128] * size,
        ):
            x = tensor(rank, sum(counts), dtype)
            made.append(end.reduce_scatter(x, counts))
            made.append(end.all_gather(tensor(rank, counts[rank], dtype), counts))
            made.append(end.all_reduce(x))
        made.append(end.gather(torch.arange(5, dtype=torch.int32) + 100 * rank))
        made.append(end.gather(tensor(rank, 2, dtype)))
    end.gather(torch.zeros(1, dtype=torch.int32))
    return [[checksum(each), *each.shape] for each in made]


def checksum(x):
    bits = x.contiguous().view(torch.uint8).flatten().to(torch.int64)
    return int((bits * (torch.arange(len(bits)) % 8191 + 1)).sum())


def say(**line):
    os.write(1, json.dumps(line).encode() + b"\n")


def run(kind, rank, size, where, epoch):
    torch.set_num_threads(1)
    deadline = Deadline(120_000_000_000)
    end = backend(kind, rank, size, where, epoch, deadline)
    say(rank=rank, values=values(end, rank, size), pid=os.getpid())
    if rank == size - 1:
        time.sleep(3600)
        return
    for wait_ns in WAITS_NS:
        deadline.allow(wait_ns)
        began = time.monotonic()
        try:
            end.all_reduce(tensor(rank, 4, torch.float32))
        except CollectiveTimeoutError as error:
            say(rank=rank, missing=error.missing, group=error.group, took=time.monotonic() - began)


def main():
    kind, size, where, epoch = sys.argv[1:]
    children = []
    for rank in range(int(size)):
        child = os.fork()
        if not child:
            run(kind, rank, int(size), where, int(epoch))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
