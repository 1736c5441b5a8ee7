"""I am alive, and here: a thread that reports where its actor stands, also while the actor is inside a kernel."""

import threading
from collections.abc import Callable
from typing import Final

from edgemesh.runtime.clock import monotonic_ns
from edgemesh.runtime.faults import faults_told
from edgemesh.runtime.link import LinkFull, PeerAbsent
from edgemesh.runtime.port import default_plane, supervisor_of
from edgemesh.runtime.zmq import ZmqPort
from edgemesh.topology import Mesh
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Phase
from edgemesh.wire.messages import Mark, Progress

Marks = Callable[[], tuple[Mark, ...]]

LOOP_BOUND_NS: Final = 10_000_000_000
"""How long an actor's loop may take over one message, or over what came together, before the actor counts as hung."""

SLOW_NS: Final = 1_000_000_000
"""Until then a report does not mention it; nor is a thread that was itself away for so long a witness of before."""


class Pulse:
    """What an actor's loop leaves for its reporter: since when it has been busy, 0 while it waits for messages."""

    __slots__ = ("since_ns",)

    def __init__(self) -> None:
        self.since_ns = 0

    def beat(self) -> None:
        """Something new begins."""
        self.since_ns = monotonic_ns()

    def rest(self) -> None:
        """Nothing is being done from now on."""
        self.since_ns = 0


class Reporter:
    """Sends ``Progress`` every ``supervisor.report_ms`` and flushes the trace, from a daemon thread.

    Until ``follow`` names the actor's own marks it reports one mark in phase ``starting``. A loop that does not come back
    to its messages gets a mark beside the actor's own, in phase ``busy``, with a bound.
    """

    def __init__(self, mesh: Mesh, port: ZmqPort) -> None:
        self._mesh, self._main = mesh, port
        self._name, self._epoch, self._trace = port.name, port.epoch, port.trace
        self.pulse = Pulse()
        self._over = threading.Event()
        self._plane = default_plane(mesh, port.name)
        self._seen_ns = self._awake_ns = monotonic_ns()
        start = (Mark(self._plane, 0, Phase.STARTING, monotonic_ns(), 0),)
        self._marks: Marks = lambda: start
        self._thread = threading.Thread(target=self._report, name=f"{port.name} progress", daemon=True)
        self._thread.start()

    def follow(self, marks: Marks) -> None:
        """Report these marks from now on; called from this object's thread."""
        self._marks = marks

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _report(self) -> None:
        port = ZmqPort(
            self._mesh,
            self._name,
            self._epoch,
            self._trace,
            only=LinkKind.REPORT,
            alias=":progress",
            context=self._main.context,
        )
        supervisor = supervisor_of(self._mesh, self._name)
        try:
            with faults_told(port, supervisor):
                while True:
                    self._trace.flush()
                    self._tell(port, supervisor)
                    if self._over.wait(self._mesh.topology.supervisor.report_ms / 1000):
                        return
        finally:
            port.close()

    def _tell(self, port: ZmqPort, supervisor: str) -> None:
        """One report; a supervisor that is behind or gone is no reason to end, its end ends everything."""
        report = Progress(self._name, self._epoch, self._standing(monotonic_ns()))
        try:
            port.send(LinkKind.REPORT, report, supervisor)
        except (LinkFull, PeerAbsent):
            self._trace.event("progress.unsent")

    def _standing(self, now: int) -> tuple[Mark, ...]:
        """The actor's own marks, and its loop's where that is slow and no step with a bound of its own is why."""
        if now - self._seen_ns > SLOW_NS + self._mesh.topology.supervisor.report_ms * 1_000_000:
            # The whole process was stopped, or starved: that is not the loop's time.
            self._awake_ns = now
        self._seen_ns = now
        own, since_ns = self._marks(), self.pulse.since_ns
        since = max(since_ns, self._awake_ns)
        if not since_ns or now - since < SLOW_NS or any(mark.bound_ns for mark in own):
            return own
        return (*own, Mark(self._plane, 0, Phase.BUSY, since, LOOP_BOUND_NS))
