"""I am alive, and here: a thread that reports where its actor stands, also while the actor is inside a kernel."""

import threading
from collections.abc import Callable

from edgemesh.runtime.clock import monotonic_ns
from edgemesh.runtime.link import LinkFull, PeerAbsent
from edgemesh.runtime.port import default_plane, supervisor_of
from edgemesh.runtime.zmq import ZmqPort
from edgemesh.topology import Mesh
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Phase
from edgemesh.wire.messages import Mark, Progress

Marks = Callable[[], tuple[Mark, ...]]


class Reporter:
    """Sends ``Progress`` every ``supervisor.report_ms`` and flushes the trace, from a daemon thread.

    Until ``follow`` names the actor's own marks it reports one mark in phase ``starting``.
    """

    def __init__(self, mesh: Mesh, port: ZmqPort) -> None:
        self._mesh, self._main = mesh, port
        self._name, self._epoch, self._trace = port.name, port.epoch, port.trace
        self._over = threading.Event()
        start = (Mark(default_plane(mesh, port.name), 0, Phase.STARTING, monotonic_ns(), 0),)
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
            while True:
                self._trace.flush()
                self._tell(port, supervisor)
                if self._over.wait(self._mesh.topology.supervisor.report_ms / 1000):
                    return
        finally:
            port.close()

    def _tell(self, port: ZmqPort, supervisor: str) -> None:
        """One report; a supervisor that is behind or gone is no reason to end, its end ends everything."""
        try:
            port.send(LinkKind.REPORT, Progress(self._name, self._epoch, self._marks()), supervisor)
        except (LinkFull, PeerAbsent):
            self._trace.event("progress.unsent")
