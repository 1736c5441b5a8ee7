"""`edgemesh bench hops`: one message from process to process, and the barrier's round, on the real links and actor.

Beside them, in the same run, the same exchange on bare blocking sockets and as a gloo all_gather. Run as a module this
file plays one process of the measurement.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table

from edgemesh.actors.barrier import BarrierActor
from edgemesh.bench import children
from edgemesh.bench.statistics import percentile
from edgemesh.runtime.actor import Port, run
from edgemesh.runtime.clock import monotonic_ns
from edgemesh.runtime.paths import make_run_dir, read_mesh
from edgemesh.runtime.trace import ListTrace
from edgemesh.runtime.zmq import ZmqPort
from edgemesh.topology import CoupledSet, Mesh, MeshShape, Topology, resolve
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Layout, Plane
from edgemesh.wire.messages import Arrive, Attached, IdleDone, IdlePlan, Release, Shape, Verdict

REAL: Final = "edgemesh.cli.bench_hops"
PLAIN: Final = "edgemesh.bench.sockets"
GLOO: Final = "edgemesh.bench.gloo"
DEADLINE_S: Final = 120.0
GLOO_SHARE: Final = 10
"""Gloo is slower by so much that it gets a tenth of the ticks."""


class Timing(Struct, frozen=True):
    """One way of one exchange, in microseconds."""

    what: str
    groups: int
    way: str
    p50_us: float
    p99_us: float
    samples: int


def measure(groups: Sequence[int], ticks: int, rounds: int, progress: Callable[[str], None]) -> list[Timing]:
    """Every way of every exchange, ``rounds`` times in turn, so that a slow moment of the machine meets all alike."""
    found: dict[tuple[str, int, str], list[int]] = {}

    def keep(what: str, size: int, way: str, series: list[list[int]], warm: int) -> None:
        progress(f"{what}, {size} groups, {way}")
        found.setdefault((what, size, way), []).extend(sample for each in series for sample in each[warm:])

    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="em-hops-") as scratch:
            keep("hop", 1, "mesh", _mesh_hop(Path(scratch), ticks), ticks // 10)
            keep("hop", 1, "sockets", _plain_hop(Path(scratch), ticks), ticks // 10)
        for size in groups:
            with tempfile.TemporaryDirectory(prefix="em-hops-") as scratch:
                keep("barrier", size, "mesh", _mesh_barrier(Path(scratch), size, ticks), ticks // 10)
                keep("barrier", size, "sockets", _plain_barrier(Path(scratch), size, ticks), ticks // 10)
                few = max(20, ticks // GLOO_SHARE)
                keep("barrier", size, "gloo", _gloo(Path(scratch), size, few), few // 10)
    return [_timing(*key, samples) for key, samples in found.items()]


def show(timings: Sequence[Timing], console: Console) -> None:
    """A table of times, and of ratios to the bare sockets and to gloo."""
    title = "microseconds; ratio: the mesh's p50 to the other way's"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1))
    for name in ("exchange", "groups", "mesh p50", "p99", "plain p50", "p99", "ratio", "gloo p50", "p99", "ratio"):
        table.add_column(name, justify="left" if name == "exchange" else "right", no_wrap=name == "exchange")
    by_key = {(each.what, each.groups, each.way): each for each in timings}
    for what, size, way in by_key:
        if way != "mesh":
            continue
        ours = by_key[what, size, "mesh"]
        cells = [what, str(size), f"{ours.p50_us:.0f}", f"{ours.p99_us:.0f}"]
        for other in ("sockets", "gloo"):
            theirs = by_key.get((what, size, other))
            cells += (
                [f"{theirs.p50_us:.0f}", f"{theirs.p99_us:.0f}", f"{ours.p50_us / theirs.p50_us:.2f}"]
                if theirs
                else ["", "", ""]
            )
        table.add_row(*cells)
    console.print(table)


def _timing(what: str, groups: int, way: str, samples: list[int]) -> Timing:
    ordered = sorted(sample / 1000 for sample in samples)
    return Timing(what, groups, way, percentile(ordered, 0.5), percentile(ordered, 0.99), len(ordered))


def _mesh_hop(scratch: Path, ticks: int) -> list[list[int]]:
    run_dir = _run_dir(scratch, 1)
    return children.run([[REAL, "hop", run_dir, str(ticks)]], [[REAL, "echo", run_dir]], deadline_s=DEADLINE_S)


def _plain_hop(scratch: Path, ticks: int) -> list[list[int]]:
    endpoint = f"ipc://{scratch}/hop"
    return children.run([[PLAIN, "hop", endpoint, str(ticks)]], [[PLAIN, "echo", endpoint]], deadline_s=DEADLINE_S)


def _mesh_barrier(scratch: Path, size: int, ticks: int) -> list[list[int]]:
    run_dir = _run_dir(scratch, size)
    groups = [[REAL, "arrive", run_dir, str(group), str(ticks)] for group in range(size)]
    return children.run(groups, [[REAL, "barrier", run_dir, str(size)]], deadline_s=DEADLINE_S)


def _plain_barrier(scratch: Path, size: int, ticks: int) -> list[list[int]]:
    endpoint = f"ipc://{scratch}/barrier"
    groups = [[PLAIN, "arrive", endpoint, str(group), str(ticks)] for group in range(size)]
    return children.run(groups, [[PLAIN, "serve", endpoint, str(size)]], deadline_s=DEADLINE_S)


def _gloo(scratch: Path, size: int, ticks: int) -> list[list[int]]:
    ranks = [[GLOO, f"{scratch}/gloo", str(rank), str(size), str(ticks)] for rank in range(size)]
    return children.run(ranks, deadline_s=DEADLINE_S)


def _run_dir(scratch: Path, groups: int) -> str:
    """A run directory of attention DP over ``groups`` (at least two, or there would be no barrier) groups of one rank."""
    size = max(2, groups)
    run_dir = scratch / "run"
    make_run_dir(run_dir, resolve(Topology(mesh=MeshShape(tp=size, dp=size, split=False))))
    return str(run_dir)


# The parts of the measurement, each in a process of its own


def _barrier(run_dir: str, groups: int) -> int:
    """The real actor in its real loop, for the first ``groups`` groups of the mesh."""

    def factory(mesh: Mesh, name: str, epoch: int, port: Port) -> BarrierActor:
        first = CoupledSet(0, tuple(range(groups)), name)
        return BarrierActor(msgspec.structs.replace(mesh, sets=(first,)), name, epoch, port)

    return run(factory, Path(run_dir), "barrier-0", 0)


def _arrive(run_dir: str, group: int, ticks: int) -> list[int]:
    """A group's port with all its sockets: arrive, wait for the release, again."""
    port = ZmqPort(read_mesh(Path(run_dir)), f"group-{group}", 0, ListTrace())
    samples = []
    for tick in range(ticks):
        start = monotonic_ns()
        port.send(LinkKind.ARRIVE, Arrive(Plane.MIXED, 0, tick, group, 1, Shape(1, 1, 1)), "barrier-0")
        while not (batch := port.receive()):
            pass
        samples.append(monotonic_ns() - start)
        ((_, release),) = batch
        assert isinstance(release, Release)
        assert release.tick == tick
    port.close()
    return samples


def _echo(run_dir: str) -> None:
    """A rank's port: every plan is answered with the time at which it was."""
    port = ZmqPort(read_mesh(Path(run_dir)), "rank-0.mixed", 0, ListTrace())
    port.send(LinkKind.RESULT, Attached(0, Plane.MIXED, 0, 0), "group-0")
    while True:
        for _, plan in port.receive():
            assert isinstance(plan, IdlePlan)
            done = IdleDone(plan.group, plan.plane, plan.epoch, plan.tick, step_ns=monotonic_ns())
            port.send(LinkKind.RESULT, done, "group-0")


def _hop(run_dir: str, count: int) -> list[int]:
    """A group's port: how old each of a rank's answers is when it has been read and checked."""
    port = ZmqPort(read_mesh(Path(run_dir)), "group-0", 0, ListTrace())
    plane, verdict = Plane.MIXED, Verdict((1, 0), Layout.EVEN, 1)
    while not port.receive():
        pass  # until the rank has attached
    samples = []
    for tick in range(count):
        port.send(LinkKind.PLAN, IdlePlan(0, plane, 0, tick, verdict), "rank-0.mixed")
        while not (batch := port.receive()):
            pass
        ((_, done),) = batch
        assert isinstance(done, IdleDone)
        samples.append(monotonic_ns() - done.step_ns)
    port.close()
    return samples


def main(words: list[str]) -> None:
    """Play the part that the words name."""
    match words:
        case ["barrier", run_dir, groups]:
            sys.exit(_barrier(run_dir, int(groups)))
        case ["arrive", run_dir, group, ticks]:
            sys.stdout.buffer.write(msgspec.json.encode(_arrive(run_dir, int(group), int(ticks))))
        case ["echo", run_dir]:
            _echo(run_dir)
        case ["hop", run_dir, count]:
            sys.stdout.buffer.write(msgspec.json.encode(_hop(run_dir, int(count))))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
