"""The loop that runs an actor, in a thread, with its supervisor's sockets in the test."""

import contextlib
import threading
import time
from pathlib import Path

import msgspec
import pytest

from edgemesh.runtime import progress
from edgemesh.runtime.actor import FAULT, run
from edgemesh.runtime.clock import monotonic_ns
from edgemesh.runtime.link import PeerAbsent
from edgemesh.runtime.port import default_plane
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Phase, Plane
from edgemesh.wire.messages import Cancel, Drain, Fault, Health, Hello, Mark, Progress, Stop

MARK = Mark(Plane.MIXED, 5, Phase.RUNNING, 9, 0)
PATIENCE_S = 60.0
"""How long to wait for what must come, however busy the machine is."""


class Recorder:
    """An actor that remembers what the loop did with it."""

    made = threading.Event()
    latest: "Recorder"

    def __init__(self, mesh, name, epoch, port):
        self.mesh, self.port, self.done = mesh, port, False
        self.calls: list[object] = []
        self.due = None
        self.settled, self.free = threading.Event(), threading.Event()
        self.where, self.broken, self.bound_ns = "", False, 0
        Recorder.latest = self
        Recorder.made.set()

    def receive(self, kind, message):
        self.calls.append(message)
        match message:
            case Drain():
                self.due = self.port.now() + 30_000_000
            case Cancel(request="end"):
                self.done = True
            case Cancel(request="crash"):
                raise ZeroDivisionError("told to")
            case Cancel(request="marks"):
                self.broken = True
            case Cancel(request="receive"):
                self.free.wait(10 * PATIENCE_S)
            case Cancel(request="settle" | "deadline" as where):
                self.where = where

    def hang(self, where):
        if self.where == where:
            self.free.wait(10 * PATIENCE_S)

    def settle(self):
        self.hang("settle")
        self.calls.append("settle")
        if self.due is not None and self.port.now() >= self.due:
            self.due = None
            self.calls.append("deadline")
        self.settled.set()

    def deadline(self):
        self.hang("deadline")
        return self.due

    def marks(self):
        if self.broken:
            raise ZeroDivisionError("in marks")
        return (msgspec.structs.replace(MARK, bound_ns=self.bound_ns),)


@pytest.fixture
def running(mesh, port_of):
    """group-0 under the loop; gives (supervisor's port, gateway's port, thread, codes)."""
    supervisor, gateway = port_of("supervisor-0"), port_of("gateway-0")
    codes: list[int] = []
    Recorder.made.clear()
    thread = threading.Thread(target=lambda: codes.append(run(Recorder, mesh_dir(mesh), "group-0", 0)))
    thread.start()
    heard = wait_for(supervisor, Hello)
    assert heard.actor == "group-0"
    assert Recorder.made.wait(PATIENCE_S)
    yield supervisor, gateway, thread, codes
    Recorder.latest.free.set()
    with contextlib.suppress(PeerAbsent):
        supervisor.send(LinkKind.COMMAND, Stop("the test is over"), "group-0")
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def mesh_dir(mesh):
    return Path(mesh.run_dir)


def wait_for(port, kind):
    """The next message of a type."""
    for _ in range(100):
        for _, message in port.receive(1000):
            if isinstance(message, kind):
                return message
    raise AssertionError(kind)


def test_hello_then_progress_from_a_thread_with_the_actors_own_marks(running):
    supervisor, *_ = running
    first = wait_for(supervisor, Progress)
    while first.marks != (MARK,):
        # A loop that gets no turn for a second has a mark of its own beside the actor's.
        assert first.marks[0] == MARK or first.marks[0].phase is Phase.STARTING
        first = wait_for(supervisor, Progress)


def test_one_settle_after_a_batch_and_stop_ends_the_loop(running):
    supervisor, _, thread, codes = running
    supervisor.send(LinkKind.COMMAND, Health(0, serving=True), "group-0")
    assert Recorder.latest.settled.wait(PATIENCE_S)
    supervisor.send(LinkKind.COMMAND, Stop("enough"), "group-0")
    thread.join(PATIENCE_S)
    assert codes == [0]
    assert Recorder.latest.calls == [Health(0, serving=True), "settle", Stop("enough")]


def test_settle_at_the_deadline_though_nothing_came(running):
    supervisor, *_ = running
    supervisor.send(LinkKind.COMMAND, Drain(1), "group-0")
    end = time.monotonic() + PATIENCE_S
    while "deadline" not in Recorder.latest.calls:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert Recorder.latest.calls[0] == Drain(1)
    assert Recorder.latest.calls[-1] == "deadline"
    # It slept in between: no spinning towards the deadline.
    assert Recorder.latest.calls.count("settle") <= 4


def test_an_actor_that_is_done_ends_the_loop(running):
    _, gateway, thread, codes = running
    gateway.send(LinkKind.STEER, Cancel(0, "end", 0), "group-0")
    thread.join(PATIENCE_S)
    assert codes == [0]


def test_an_exception_is_reported_traced_and_has_its_exit_code(running, mesh, capfd):
    supervisor, gateway, thread, codes = running
    gateway.send(LinkKind.STEER, Cancel(0, "crash", 0), "group-0")
    assert wait_for(supervisor, Fault).reason == "ZeroDivisionError: told to"
    thread.join(PATIENCE_S)
    assert codes == [FAULT]
    lines = [msgspec.json.decode(line) for line in (mesh_dir(mesh) / "trace/group-0.jsonl").read_bytes().splitlines()]
    (fault,) = [line for line in lines if line["event"] == "actor.fault"]
    assert "in receive" in fault["stack"]
    assert "ZeroDivisionError" in capfd.readouterr().err


def until(port, marks):
    """The next report whose marks are such."""
    for _ in range(200):
        found = wait_for(port, Progress).marks
        if marks(found):
            return found
    raise AssertionError(found)


@pytest.mark.parametrize("where", ["receive", "settle", "deadline"])
def test_a_loop_that_hangs_is_marked_until_it_goes_on(running, monkeypatch, where):
    monkeypatch.setattr(progress, "SLOW_NS", 100_000_000)
    supervisor, gateway, *_ = running
    until(supervisor, lambda marks: marks == (MARK,))
    before = monotonic_ns()
    gateway.send(LinkKind.STEER, Cancel(0, where, 0), "group-0")
    _, busy = until(supervisor, lambda marks: len(marks) == 2)
    assert busy == Mark(Plane.MIXED, 0, Phase.BUSY, busy.since_ns, progress.LOOP_BOUND_NS)
    assert before < busy.since_ns < monotonic_ns()
    # A step that has a bound of its own is told by that alone.
    Recorder.latest.bound_ns = 1
    until(supervisor, lambda marks: len(marks) == 1)
    Recorder.latest.bound_ns = 0
    until(supervisor, lambda marks: len(marks) == 2)
    Recorder.latest.where = ""
    Recorder.latest.free.set()
    until(supervisor, lambda marks: marks == (MARK,))


def test_time_in_which_the_whole_process_was_away_is_not_the_loops(running, monkeypatch):
    monkeypatch.setattr(progress, "SLOW_NS", 100_000_000)
    supervisor, gateway, *_ = running
    gateway.send(LinkKind.STEER, Cancel(0, "settle", 0), "group-0")
    until(supervisor, lambda marks: len(marks) == 2)
    away_ns = 3600 * 1_000_000_000
    monkeypatch.setattr(progress, "monotonic_ns", lambda: monotonic_ns() + away_ns)
    until(supervisor, lambda marks: len(marks) == 1)
    _, busy = until(supervisor, lambda marks: len(marks) == 2)
    assert busy.since_ns > away_ns


def test_what_ends_the_reports_is_told(running, mesh, capfd):
    supervisor, gateway, *_ = running
    gateway.send(LinkKind.STEER, Cancel(0, "marks", 0), "group-0")
    assert wait_for(supervisor, Fault) == Fault("group-0", 0, "ZeroDivisionError: in marks")
    assert "in marks" in capfd.readouterr().err


def test_the_plane_of_an_actor_without_steps(mesh):
    assert default_plane(mesh, "rank-1.mixed") is default_plane(mesh, "router-0") is Plane.MIXED
