"""The same agreement through a collective: all_gather of 8 int64 among as many processes.

``python -m edgemesh.bench.gloo FILE RANK WORLD TICKS`` prints how long each tick took, in nanoseconds.
"""

from __future__ import annotations

import sys
import time

import msgspec
import torch
import torch.distributed


def gather(file: str, rank: int, world: int, ticks: int) -> list[int]:
    """One process of ``world``; they meet in ``file``."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(file, world)  # type: ignore[attr-defined]  # torch does not list it
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mine = torch.full((8,), rank)
    everyone = [torch.zeros(8, dtype=torch.int64) for _ in range(world)]
    samples = []
    for _ in range(ticks):
        start = time.monotonic_ns()
        torch.distributed.all_gather(everyone, mine)
        samples.append(time.monotonic_ns() - start)
    torch.distributed.destroy_process_group()
    return samples


def main(words: list[str]) -> None:
    """Take part, and print the samples."""
    file, rank, world, ticks = words
    sys.stdout.buffer.write(msgspec.json.encode(gather(file, int(rank), int(world), int(ticks))))


if __name__ == "__main__":
    main(sys.argv[1:])
