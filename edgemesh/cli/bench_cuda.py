"""``python -m edgemesh.cli.bench_cuda``: one GPU's steps, without a mesh, against what its memory and its matrix units allow.

Weights are noise in the shape of Qwen3-8B. Decode: time per step, planned ahead as a group does, over the floor (bytes of
weights and KV over the copy bandwidth measured in the same run). Prefill: model FLOP/s as a share of a large matrix product's.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
import torch
from torch import Tensor

from edgemesh.engine.collectives import alone
from edgemesh.engine.cuda.attention import choose
from edgemesh.engine.cuda.runner import CudaRunner
from edgemesh.engine.layout import Split, targets
from edgemesh.engine.shape import Family, ModelShape, RopeScaling
from edgemesh.engine.turns import Limits, Station
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Layout, Plane
from edgemesh.wire.messages import Chunk, Decode, Done, IdleDone, Join, Plan, Prefill, Sampling, Verdict

SHAPE: Final = ModelShape(
    family=Family.QWEN3,
    hidden=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=12288,
    vocab=151936,
    rope_theta=1e6,
    rope_scaling=RopeScaling(),
    norm_eps=1e-6,
    qkv_bias=False,
    o_bias=False,
    qk_norm=True,
    tie=False,
    max_position=40960,
    sliding_window=0,
    dtype="bfloat16",
)
PAGE_TOKENS: Final = 256
STEPS: Final = 40
WARM: Final = 5
POSITIONS: Final = 20480


class DecodeReport(msgspec.Struct, frozen=True):
    """Milliseconds of one step of ``batch`` rows at ``context`` tokens each."""

    attention: str
    batch: int
    context: int
    step_ms: float
    gpu_ms: float
    floor_ms: float

    def __str__(self) -> str:
        idle = 100 * (1 - self.gpu_ms / self.step_ms)
        return (
            f"decode {self.attention:10} batch {self.batch:3} context {self.context}: step {self.step_ms:6.2f} ms, GPU "
            f"{self.gpu_ms:6.2f}, floor {self.floor_ms:6.2f}, over the floor {self.step_ms / self.floor_ms:.3f}, idle {idle:.1f} %"
        )


class PrefillReport(msgspec.Struct, frozen=True):
    """Milliseconds of a step of prompts of these ``lengths``."""

    attention: str
    lengths: tuple[int, ...]
    step_ms: float
    share: float

    def __str__(self) -> str:
        rate = sum(self.lengths) / self.step_ms
        return (
            f"prefill {self.attention:10} {self.lengths}: {self.step_ms:.1f} ms, {rate:.1f}k tokens/s, {self.share:.3f} of a large "
            "matrix product's FLOP/s"
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a line per figure, and write them all as JSON if asked to."""
    parser = argparse.ArgumentParser(prog="python -m edgemesh.cli.bench_cuda", description=__doc__)
    parser.add_argument("--attention", default="auto,torch", help="kernels to measure, in order")
    parser.add_argument("--batches", default="1,16,64,128")
    parser.add_argument("--context", type=int, default=2860)
    parser.add_argument("--json", default="")
    parser.add_argument("--profile", action="store_true", help="print where the time of a decode step goes")
    found = parser.parse_args(arguments)
    batches = [int(each) for each in found.batches.split(",")]
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]  # torch leaves it so
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    say(
        f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, 8192^3 bf16 product {rate / 1e12:.0f} TFLOP/s"
    )
    reports: list[DecodeReport | PrefillReport] = []
    tensors = weights(max(batches), found.context)
    for wanted in found.attention.split(","):
        bench = Bench(tensors, wanted, batches)
        for report in bench.run(batches, found.context, bandwidth, rate, profile=found.profile):
            say(str(report))
            reports.append(report)
        del bench
        torch.cuda.empty_cache()
    if found.json:
        with open(found.json, "w", encoding="utf-8") as file:  # noqa: PTH123 - a path that the caller names
            json.dump({"copy": bandwidth, "matrix": rate, "reports": msgspec.to_builtins(reports)}, file, indent=1)


def say(line: str) -> None:
    """A line of the report, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def timed(action: Callable[[], object], count: int) -> float:
    """Seconds of GPU time of one ``action``, the mean of ``count`` after a warm-up."""
    for _ in range(3):
        action()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        action()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count / 1e3


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), 10)


def matrix_rate() -> float:
    """FLOP/s of a bf16 product of 8,192-square matrices of noise."""
    a, b = (torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / timed(lambda: a @ b, 10)


def weights(rows: int, context: int) -> dict[str, Tensor]:
    """Noise in every tensor of the model, and a slab for so many rows and one long prompt."""
    tensors = {}
    for target in targets(SHAPE, Split()):
        scale = 1.0 if len(target.shape) == 1 else 0.02
        tensors[target.name] = torch.randn(target.shape, device="cuda", dtype=torch.bfloat16) * scale
    pages = 1 + rows * (-(-(context + STEPS * 3) // PAGE_TOKENS)) + 8192 // PAGE_TOKENS + 8
    slab = torch.empty((SHAPE.layers, 2, pages, PAGE_TOKENS, 8, 128), device="cuda", dtype=torch.bfloat16)
    for layer in slab:
        layer.normal_()
    return {**tensors, "kv": slab}


class Bench:
    """A rank of both planes, fed with plans as its group would."""

    def __init__(self, tensors: dict[str, Tensor], wanted: str, sizes: Iterable[int]) -> None:
        self._tensors = tensors
        self._pages = tensors["kv"].shape[2]
        sizes = tuple(sorted(sizes))
        limits = Limits(self._pages, PAGE_TOKENS, sizes[-1], POSITIONS, SHAPE.vocab)
        attention = choose(wanted, PAGE_TOKENS, SHAPE.head_dim, say)
        self.name = attention.name
        station = Station(0, Plane.MIXED, 0)
        self._runner = CudaRunner(station, limits, SHAPE, Split(), tensors, alone(), attention, sizes)
        began = time.perf_counter()
        self._runner.warm_up(8192, say)
        say(f"warm-up {time.perf_counter() - began:.1f} s")
        self._tick = 0

    def run(
        self, batches: list[int], context: int, bandwidth: float, rate: float, *, profile: bool
    ) -> Iterator[DecodeReport | PrefillReport]:
        """Every figure."""
        for lengths in ((8192,), (2860, 2860, 2860), (2048,), (512,)):
            seconds = min(self._prompts(lengths) for _ in range(4))
            yield PrefillReport(self.name, lengths, seconds * 1e3, flops(lengths) / seconds / rate)
        for batch in batches:
            seconds, gpu = self._decode(batch, context, profile=profile)
            floor = self._floor_bytes(batch, context) / bandwidth
            yield DecodeReport(self.name, batch, context, seconds * 1e3, gpu * 1e3, floor * 1e3)

    def _floor_bytes(self, batch: int, context: int) -> int:
        matrices = sum(each.nbytes for name, each in self._tensors.items() if name not in {"embed", "kv"})
        return matrices + batch * context * self._tensors["kv"][:, :, 0, 0].nbytes

    def _send(self, tokens: int, prefill: Prefill | None, decode: Decode | None, bucket: int) -> None:
        layout = Layout.EVEN if bucket else Layout.RAGGED
        verdict = Verdict((tokens,), layout, bucket, graph=bool(bucket))
        self._runner.allow(60_000_000_000)
        self._runner.submit(Plan(0, Plane.MIXED, 0, self._tick, verdict, prefill, decode))
        self._tick += 1

    def _take(self) -> Done | IdleDone:
        answer = None
        while answer is None:
            answer = self._runner.finished()
        return answer

    def _prompts(self, lengths: tuple[int, ...]) -> float:
        """Seconds from the plan to its answer."""
        free = iter(range(1, self._pages))
        chunks = tuple(
            Chunk(
                str(number),
                0,
                length,
                tuple(next(free) for _ in range(-(-length // PAGE_TOKENS))),
                final=True,
                sampling=Sampling(temperature=0.0),
            )
            for number, length in enumerate(lengths)
        )
        tokens = torch.randint(SHAPE.vocab, (sum(lengths),)).tolist()
        began = time.perf_counter()
        self._send(len(tokens), Prefill(chunks, TokenArray.of(tokens)), None, 0)
        self._take()
        return time.perf_counter() - began

    def _decode(self, batch: int, context: int, *, profile: bool) -> tuple[float, float]:
        """(seconds per step, planned one ahead, seconds of its graph alone)."""
        each = -(-(context + STEPS * 3) // PAGE_TOKENS)
        joins = tuple(
            Join(
                slot,
                str(slot),
                slot + 10,
                context - STEPS // 2,
                tuple(range(1 + slot * each, 1 + (slot + 1) * each)),
                Sampling(temperature=0.0),
                1,
            )
            for slot in range(batch)
        )
        self._send(batch, None, Decode(joins=joins), batch)
        for _ in range(WARM):
            self._send(batch, None, Decode(), batch)
            self._take()
        began = time.perf_counter()
        for _ in range(STEPS):
            self._send(batch, None, Decode(), batch)
            self._take()
        seconds = (time.perf_counter() - began) / STEPS
        self._take()
        pages = -(-context // PAGE_TOKENS)
        gpu = timed(lambda: self._runner.replay(batch, pages), 10)
        if profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                self._runner.replay(batch, pages)
                torch.cuda.current_stream().synchronize()
            say(seen.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60))
        # The replays moved the rows on unasked: they leave, as after any end.
        self._send(1, None, Decode(leaves=tuple(range(1, batch))), 1)
        self._take()
        chunk = Chunk("last", 0, 1, (1,), final=True, sampling=Sampling(temperature=0.0))
        self._send(1, Prefill((chunk,), TokenArray.of([1])), Decode(leaves=(0,)), 0)
        self._take()
        return seconds, gpu


def flops(lengths: tuple[int, ...]) -> float:
    """What the model itself computes for whole prompts: matrix products, and attention over half of each square."""
    heads = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim + SHAPE.heads * SHAPE.head_dim
    matrices = SHAPE.layers * SHAPE.hidden * (heads + 3 * SHAPE.mlp)
    attention = sum(2 * length**2 * SHAPE.heads * SHAPE.head_dim * SHAPE.layers for length in lengths)
    return 2.0 * matrices * sum(lengths) + attention


if __name__ == "__main__":
    main()
