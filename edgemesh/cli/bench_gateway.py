"""`edgemesh bench demo --section gateway`: how many tokens one gateway process streams on one core, beside a bare uvicorn.

Ranks answer at once (``engine.kind = "null"``). Where there are several cores the process that is measured has the first for itself.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from edgemesh.bench import bare, processes, prompts
from edgemesh.bench.client import target
from edgemesh.bench.launch import Launched, free_port, serving
from edgemesh.bench.load import Load, drive
from edgemesh.bench.peer import wait_healthy
from edgemesh.bench.statistics import Summary, summarise

SHAPE: Final = prompts.Shape("smollm2-135m", input_len=32, output_len=256)
STREAMS: Final = 256
START_S: Final = 120.0
NULL: Final[dict[str, object]] = {
    "mesh.name": "bench",
    "engine.kind": "null",
    "engine.kv_pages": 16384,
    "decode.slots": STREAMS,
}


class Cost(msgspec.Struct, frozen=True):
    """One load on one server: its summary, and the processor time of each measured process per token."""

    summary: Summary
    us_per_token: list[float]
    pieces: float
    """Pieces of text that reached the client, per token: a server that is behind sends several tokens in one."""

    def figures(self) -> dict[str, float]:
        """What the table shows; the rate of one core is what its processor time comes to."""
        mean = sum(self.us_per_token)
        return {
            "output tok/s": self.summary.output_tokens_per_s,
            "server us/tok": mean,
            "tok/s a core": 1e6 / mean if mean else float("nan"),
            "pieces a token": self.pieces,
            "TTFT p99 ms": self.summary.ttft_ms.p99,
            "ITL p99 ms": self.summary.itl_ms.p99,
        }


def measure(rounds: int, say: Callable[[str], None]) -> Iterator[tuple[str, dict[str, float]]]:
    """(what, figures) of every server in turn: one gateway, the bare server with the same bytes, two gateways."""
    with tempfile.TemporaryDirectory(prefix="em-gateway-") as scratch:
        stream = Path(scratch) / "stream"
        for turn in range(rounds):
            say(f"one gateway, round {turn + 1}")
            with _mesh(1) as launched:
                stream.write_bytes(bare.one_each(_recorded(launched.port), SHAPE.output_len))
                ours = _load(launched.url, [pid for name, pid in launched.actors().items() if "gateway" in name], turn)
            yield "one gateway", ours.figures()
            say(f"bare uvicorn, round {turn + 1}")
            with _bare(stream) as (url, pid):
                plain = _load(url, [pid], turn)
            ratio = ours.summary.output_tokens_per_s / plain.summary.output_tokens_per_s
            yield "bare uvicorn, an event a token", plain.figures()
            yield "gateway to bare", {"output tok/s": ratio}
            say(f"two gateways, round {turn + 1}")
            with _mesh(2) as launched:
                both = [pid for name, pid in launched.actors().items() if "gateway" in name]
                two = _load(launched.url, both, turn, pin=False)
            yield "two gateways", two.figures() | {"busier one's share": max(two.us_per_token) / sum(two.us_per_token)}


def _mesh(gateways: int) -> AbstractContextManager[Launched]:
    return serving("tp1-cpu", NULL | {"gateway.processes": gateways}, START_S)


@contextmanager
def _bare(stream: Path) -> Iterator[tuple[str, int]]:
    port = free_port()
    words = [sys.executable, "-m", "edgemesh.bench.bare", str(stream), str(port)]
    with (stream.parent / "bare.log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)  # noqa: S603 - our own module
    url = f"http://127.0.0.1:{port}"
    try:
        wait_healthy(process, url, stream.parent / "bare.log")
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _recorded(port: int) -> bytes:
    """The body of one streamed answer, as the gateway sends it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", prompts.path(SHAPE), prompts.body(SHAPE, 1 << 20))
        return connection.getresponse().read()
    finally:
        connection.close()


def _load(url: str, pids: list[int], turn: int, *, pin: bool = True) -> Cost:
    """A closed loop of ``STREAMS``, twice as many requests, after as many to warm up; client and all others on the other cores."""
    cores = sorted(os.sched_getaffinity(0))
    shape = msgspec.structs.replace(SHAPE, seed=turn)
    with _apart(pids, cores) if pin and len(cores) > 1 else _as_it_is():
        before = [processes.cpu_ns(pid) for pid in pids]
        calls = drive(target(url), shape, Load(2 * STREAMS, STREAMS, warmup=STREAMS), lambda _: None)
        spent = [processes.cpu_ns(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    summary = summarise(calls)
    if summary.failed:
        message = next(call.error for call in calls if call.error)
        raise RuntimeError(message)
    # The warm-up's tokens count, too: it is of the same kind, and its time is in the processes'.
    tokens = summary.output_tokens + STREAMS * SHAPE.output_len
    pieces = sum(len(call.stamps) for call in calls) / summary.output_tokens
    return Cost(summary, [used / 1000 / tokens for used in spent], pieces)


@contextmanager
def _apart(pids: list[int], cores: list[int]) -> Iterator[None]:
    """The measured processes on the first core, this one on the others."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores[:1])
    os.sched_setaffinity(0, cores[1:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield
