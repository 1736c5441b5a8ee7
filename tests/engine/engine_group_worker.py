"""A rank process of the collectives' tests: does what its arguments say over one backend, and prints what came of it.

The last line of its output is JSON: ``{"values": ...}``, or ``{"missing": [...], "took": seconds}``.
"""

import json
import sys
import time

import torch
from torch._C._distributed_c10d import FileStore

from edgemesh.engine.collectives import CollectiveTimeoutError, Deadline
from edgemesh.engine.gloo import GlooBackend
from edgemesh.engine.memory import Region
from edgemesh.engine.shared import SharedBackend


def backend(kind, rank, size, where, epoch, deadline):
    if kind == "gloo":
        return GlooBackend("world", rank, size, FileStore(where, size), "127.0.0.1", deadline)
    nbytes, fd = (int(part) for part in where.split(":"))
    region = Region.adopt(fd, nbytes).tensor(0, torch.uint8, (nbytes,))
    return SharedBackend("world", rank, size, region, epoch, deadline)


def tensor(rank, rows, dtype):
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn((rows, 7), generator=generator).to(dtype)


def values(end, rank, size):
    """Every operation on even, ragged, empty and large inputs, as nested lists."""
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        for counts in ([3] * size, list(range(size)), [0] * (size - 1) + [5], [9000 + each for each in range(size)]):
            x = tensor(rank, sum(counts), dtype)
            made.append(end.reduce_scatter(x, counts))
            made.append(end.all_gather(tensor(rank, counts[rank], dtype), counts))
            made.append(end.all_reduce(x))
        made.append(end.gather(torch.arange(5, dtype=torch.int32) + 100 * rank))
        made.append(end.gather(tensor(rank, 2, dtype)))
    digests = [[float(each.double().sum()), list(each.shape), hash_of(each)] for each in made]
    end.gather(torch.zeros(1, dtype=torch.int32))
    return digests


def hash_of(x):
    return int(x.contiguous().view(torch.uint8).flatten().to(torch.int64).mul(torch.arange(x.nbytes) % 8191 + 1).sum())


def main():
    kind, job, rank, size, where, epoch = sys.argv[1:]
    torch.set_num_threads(1)
    rank, size = int(rank), int(size)
    deadline = Deadline(30_000_000_000)
    end = backend(kind, rank, size, where, int(epoch), deadline)
    end.gather(torch.zeros(1, dtype=torch.int32))
    print("met", flush=True)
    if job == "values":
        print(json.dumps({"values": values(end, rank, size)}), flush=True)
        return
    if rank == size - 1:
        sys.stdin.readline()  # the last rank stays away until the test has killed it
        return
    deadline.allow(1_000_000_000)
    began = time.monotonic()
    try:
        end.all_reduce(tensor(rank, 4, torch.float32))
    except CollectiveTimeoutError as error:
        print(
            json.dumps({"missing": error.missing, "group": error.group, "took": time.monotonic() - began}), flush=True
        )


if __name__ == "__main__":
    main()
