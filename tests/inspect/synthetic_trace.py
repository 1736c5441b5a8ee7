"""Writes traces as the actors do, with times that a test can compute by hand."""

import json
from collections.abc import Iterable
from pathlib import Path

MS = 1_000_000
BASE = 1_700_000_000_000_000_000
"""Wall nanoseconds of the first moment of every synthetic trace."""

BOOT = 1_699_000_000_000_000_000
"""Wall minus monotonic nanoseconds of the host."""


class TraceWriter:
    """Appends events of any actor to a trace directory; times are milliseconds since ``BASE``."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory

    def path(self, actor: str) -> Path:
        return self.directory / f"{actor}.jsonl"

    def event(self, actor: str, event: str, at: float, **fields: object) -> None:
        self.raw(actor, line(actor, event, at, **fields))

    def raw(self, actor: str, data: bytes) -> None:
        with self.path(actor).open("ab") as file:
            file.write(data)

    def rotate(self, actor: str, files: int = 3) -> None:
        for number in range(files - 1, 0, -1):
            old = self.directory / f"{actor}.{number}.jsonl"
            if old.exists():
                old.replace(self.directory / f"{actor}.{number + 1}.jsonl")
        self.path(actor).replace(self.directory / f"{actor}.1.jsonl")

    def tick(self, group: int, plane: str, tick: int, times: tuple[float, float, float], **fields: object) -> None:
        """One group's arrive, plan and done."""
        arrive, plan, done = times
        actor, shared = f"group-{group}", {"plane": plane, "tick": tick}
        step, wait = int((done - plan) * MS), int((plan - arrive) * MS)
        self.event(actor, "tick.arrive", arrive, **shared, tokens=fields.get("tokens", 1), sequences=1)
        if "paced_ns" in fields:
            # As a group writes it: the plan was made when it arrived.
            fields["since_ns"] = wait
        planned = {"tokens": 1, "sequences": 1, "requests": [], "idle": False, "hold": "", **fields}
        self.event(actor, "tick.plan", plan, **shared, **planned)
        self.event(actor, "tick.done", done, **shared, step_ns=step, wait_ns=wait)

    def release(self, plane: str, tick: int, at: float, last: int, wait_ms: float = 0, width: int = 2) -> None:
        fields = {"wait_ns": int(wait_ms * MS), "last": last, "tokens": [1] * width, "layout": "even", "bucket": 1}
        self.event("barrier-0", "tick.release", at, plane=plane, tick=tick, set=0, **fields)

    def step(self, rank: int, plane: str, tick: int, at: float, *, group: int, own_ms: float, whole_ms: float) -> None:
        fields = {"step_ns": int(whole_ms * MS), "collective_ns": int((whole_ms - own_ms) * MS)}
        actor = f"rank-{rank}.{plane}"
        self.event(actor, "tick.step", at, plane=plane, tick=tick, tokens=1, idle=False, group=group, **fields)


def line(actor: str, event: str, at: float, **fields: object) -> bytes:
    ts = BASE + int(at * MS)
    record = {"ts": ts, "mono": ts - BOOT, "actor": actor, "epoch": 0, "event": event, **fields}
    return json.dumps(record).encode() + b"\n"


def two_groups(directory: Path, request: str = "req-slow", neighbour: str = "req-neighbour") -> TraceWriter:
    """A coupled set of two groups, split; ``request`` lives in group 1 and takes 158 ms, its neighbour is quick."""
    to = TraceWriter(directory)
    to.event("gateway-0", "request.received", 0, request=request, endpoint="/v1/completions", stream=True)
    to.event("gateway-0", "request.tokenised", 2, request=request, prompt_tokens=300, ns=2 * MS)
    to.event("gateway-0", "request.submitted", 3, request=request, attempt=0, choice=0)
    to.event("router-0", "request.placed", 4, request=request, group=1, policy="prefix", why="longest prefix")
    to.event("group-1", "request.queued", 5, request=request, prompt_tokens=300, waiting=2)
    to.event("group-1", "request.admitted", 15, request=request, cached_tokens=100, pages=5)
    to.tick(1, "prefill", 7, (16, 20, 50), tokens=128, requests=[request])
    to.release("prefill", 7, 20, last=0, wait_ms=4)
    to.tick(1, "prefill", 8, (45, 52, 90), tokens=140, requests=[request, neighbour])
    to.release("prefill", 8, 52, last=0, wait_ms=7)
    for rank in range(4):
        to.step(rank, "prefill", 7, 49, group=rank // 2, own_ms=20 + rank, whole_ms=28)
        to.step(rank, "prefill", 8, 89, group=rank // 2, own_ms=30 - rank, whole_ms=36)
    to.event("group-1", "request.prefilled", 90, request=request, tick=8)
    to.event("gateway-0", "request.first_token", 91, request=request, ttft_ns=91 * MS)
    to.event("group-1", "request.joined", 100, request=request, slot=3, tick=40)
    decode_ticks(to, [(40, 100, 101, 111, 1), (41, 111, 131, 141, 0), (42, 142, 143, 153, 1)])
    to.event("group-1", "request.finished", 153, request=request, finish="length", output_tokens=4, tick=42)
    to.event("gateway-0", "request.sent", 156, request=request, tokens=4, ns=MS // 2)
    ended = {"prompt_tokens": 300, "output_tokens": 4, "ttft_ns": 91 * MS, "e2e_ns": 158 * MS, "group": 1}
    to.event("gateway-0", "request.finished", 158, request=request, finish="length", **ended)
    quick(to, neighbour)
    return to


def decode_ticks(to: TraceWriter, ticks: Iterable[tuple[int, float, float, float, int]]) -> None:
    """Decode ticks of group 1 in a set of two; rank 2 always has the most work of its own."""
    for tick, arrive, plan, done, last in ticks:
        to.tick(1, "decode", tick, (arrive, plan, done), tokens=2, sequences=2)
        to.release("decode", tick, plan, last=last, wait_ms=plan - arrive)
        for rank in range(4):
            to.step(rank, "decode", tick, done - 0.5, group=rank // 2, own_ms=6 + (rank == 2), whole_ms=9)


def quick(to: TraceWriter, request: str) -> None:
    """A request that ends with its first token."""
    to.event("gateway-0", "request.received", 40, request=request, endpoint="/v1/completions", stream=False)
    to.event("gateway-0", "request.submitted", 41, request=request, attempt=0, choice=0)
    to.event("group-1", "request.queued", 42, request=request, prompt_tokens=12, waiting=1)
    to.event("group-1", "request.admitted", 43, request=request, cached_tokens=0, pages=1)
    to.event("group-1", "request.finished", 90, request=request, finish="stop", output_tokens=1, tick=8)
    to.event("gateway-0", "request.finished", 92, request=request, finish="stop", output_tokens=1, group=1)
