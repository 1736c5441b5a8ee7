"""One rank of a coupled set over NCCL, graphs and all: ``RANK ATTN_TP GROUPS MODEL STORE DEVICE``.

Every rank works through the same story. Those of group 0 run it; the others run idle plans of the same ticks. The last line on standard
output is JSON: the tokens of every stream, as this rank's group drew them, and which steps were graphs.
"""

import json
import os
import sys

import msgspec
import torch
from cuda_models import PAGE_TOKENS, PAGES, POSITIONS, SIZES, SLOTS, Driver, Stream, prompt
from torch._C._distributed_c10d import FileStore, PrefixStore

from edgemesh.engine.collectives import Collectives, Deadline, Group
from edgemesh.engine.cuda.attention import choose
from edgemesh.engine.cuda.nccl import maker
from edgemesh.engine.cuda.runner import CudaRunner
from edgemesh.engine.layout import Split, local
from edgemesh.engine.shape import read_shape
from edgemesh.engine.turns import Limits, Station
from edgemesh.engine.weights import DTYPES, shard_all
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Done, IdlePlan, Sampling


class Member:
    """A runner as the story's driver sees it; an idle group's answers are made up, as many tokens as the plan would draw."""

    def __init__(self, runner, attn_tp, groups, group):
        self.runner, self.attn_tp, self.groups, self.group = runner, attn_tp, groups, group
        self._turns, self._flying = runner._turns, runner._flying
        self.made = []
        self.graphs = 0

    def allow(self, wait_ns):
        self.runner.allow(wait_ns)

    def submit(self, plan):
        verdict = plan.verdict
        bucket = -(-verdict.bucket // self.attn_tp) * self.attn_tp
        tokens = (*verdict.tokens, *[0] * (self.groups - 1))
        verdict = msgspec.structs.replace(verdict, tokens=tokens, bucket=bucket)
        self.graphs += verdict.graph
        if self.group == 0:
            self.runner.submit(msgspec.structs.replace(plan, verdict=verdict))
            return
        chunks = plan.prefill.chunks if plan.prefill else ()
        count = sum(chunk.final for chunk in chunks) + tokens[0] - sum(chunk.length for chunk in chunks)
        self.made.append(Done(0, plan.plane, 0, plan.tick, firsts=(5,) * count))
        self.runner.submit(IdlePlan(self.group, plan.plane, 0, plan.tick, verdict))

    def finished(self):
        answer = self.runner.finished()
        return answer if self.group == 0 else self.made.pop(0)


def runner_of(rank, attn_tp, groups, path, store, device):
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream())
    deadline = Deadline(120_000_000_000)
    group, attn_rank = divmod(rank, attn_tp)
    size = attn_tp * groups
    make = maker(
        Plane.MIXED, {"world": "world", "attn": f"attn-{group}"}, PrefixStore("0", FileStore(store, size)), deadline
    )
    attn = Group("attn", attn_rank, attn_tp, make("attn", attn_rank, attn_tp) if attn_tp > 1 else None)
    world = attn if groups == 1 else Group("world", rank, size, make("world", rank, size))
    shape = read_shape(path / "config.json", "bfloat16")
    split = Split(attn_tp, attn_rank, size, rank)
    tensors = {name: each.cuda() for name, each in shard_all(path, split, "bfloat16").items()}
    sizes_kv = (shape.layers, 2, PAGES, PAGE_TOKENS, local(shape, split).kv_local, shape.head_dim)
    tensors["kv"] = torch.full(sizes_kv, 1e3, dtype=DTYPES["bfloat16"], device="cuda")
    limits = Limits(PAGES, PAGE_TOKENS, SLOTS, POSITIONS, shape.vocab)
    sizes = sorted({-(-each // attn_tp) * attn_tp for each in SIZES})
    station = Station(group, Plane.MIXED, 0, group, groups)
    kernels = choose("auto", PAGE_TOKENS, shape.head_dim, lambda _line: None)
    torch.cuda.synchronize()
    runner = CudaRunner(station, limits, shape, split, tensors, Collectives(attn, world, deadline), kernels, sizes)
    runner.warm_up(512, lambda _line: None)
    return runner


def story(driver):
    """Prompts in chunks, rows that join and leave, steps planned ahead, a sampled row, chunks beside rows."""
    streams = [Stream("a", prompt(21, 300)), Stream("b", prompt(22, 20)), Stream("c", prompt(23, 70))]
    sampled = Stream("d", prompt(24, 30), Sampling(seed=3, top_k=2, min_p=0.9))
    driver.prefill(*streams, chunk=128)
    driver.submit(joins=dict(enumerate(streams)))
    driver.submit()
    driver.take()
    driver.submit()
    driver.take()
    driver.take()
    driver.prefill(sampled, decode=True)
    driver.decode(joins={3: sampled}, leaves=(1,))
    driver.decode(graph=False)
    for _ in range(3):
        driver.decode()
    return [*streams, sampled]


def main():
    from pathlib import Path

    rank, attn_tp, groups = (int(each) for each in sys.argv[1:4])
    runner = runner_of(rank, attn_tp, groups, Path(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
    member = Member(runner, attn_tp, groups, rank // attn_tp)
    streams = story(Driver(member))
    torch.cuda.synchronize()
    line = {"graphs": member.graphs, "tokens": [each.tokens for each in streams]}
    os.write(1, b"\n" + json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
    os._exit(0)  # what NCCL and the driver do at a process's end is not what is tried here
