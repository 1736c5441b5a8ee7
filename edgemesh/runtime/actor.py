"""The loop of a synchronous actor, and the ``main`` of every actor's module.

Set-up: open the links, say Hello. Running: wait, receive a bounded batch, settle once. Teardown: say why, close.
An actor is a plain class with the methods of ``SyncActor``; ``python -m edgemesh.actors.<role>`` calls ``main(Class)``.
"""

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgemesh.runtime.faults import FAULT, faults_told
from edgemesh.runtime.paths import read_mesh, trace_dir
from edgemesh.runtime.port import ActorFactory, Port, SyncActor, default_plane, supervisor_of
from edgemesh.runtime.progress import Pulse, Reporter
from edgemesh.runtime.trace import FileTrace
from edgemesh.runtime.zmq import ZmqPort
from edgemesh.topology import Mesh
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.messages import Hello, Stop

__all__ = [
    "FAULT",
    "ActorFactory",
    "Arguments",
    "Port",
    "SyncActor",
    "default_plane",
    "faults_told",
    "main",
    "open_trace",
    "parse_arguments",
    "run",
    "supervisor_of",
]


@dataclass(frozen=True, slots=True)
class Arguments:
    """What every actor's process is told. ``listen``: the gateways' listening socket, -1 for none."""

    run_dir: Path
    name: str
    epoch: int
    listen: int


def parse_arguments(arguments: Sequence[str] | None = None) -> Arguments:
    """``--run-dir DIR --name group-0 --epoch 0 [--listen FD]``."""
    parser = argparse.ArgumentParser(description="One actor of a mesh; the supervisor starts it.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--listen", type=int, default=-1)
    found = parser.parse_args(arguments)
    return Arguments(found.run_dir, found.name, found.epoch, found.listen)


def open_trace(mesh: Mesh, name: str, epoch: int) -> FileTrace:
    """The actor's own trace file, as the topology wants it."""
    settings = mesh.topology.trace
    return FileTrace(
        trace_dir(mesh), name, epoch, level=settings.level, max_bytes=settings.max_bytes, files=settings.files
    )


def main(factory: ActorFactory, arguments: Sequence[str] | None = None) -> None:
    """The whole of an actor's module under ``__main__``; exits with the process's code."""
    found = parse_arguments(arguments)
    sys.exit(run(factory, found.run_dir, found.name, found.epoch))


def run(factory: ActorFactory, run_dir: Path, name: str, epoch: int) -> int:
    """Open the links, run the actor until it is done or told to stop; returns the exit code."""
    mesh = read_mesh(run_dir)
    trace = open_trace(mesh, name, epoch)
    port = ZmqPort(mesh, name, epoch, trace)
    try:
        with faults_told(port, supervisor_of(mesh, name)) as outcome:
            port.send(LinkKind.REPORT, Hello(name, epoch, os.getpid()), supervisor_of(mesh, name))
            reporter = Reporter(mesh, port)
            try:
                actor = factory(mesh, name, epoch, port)
                reporter.follow(actor.marks)
                # What is alive now lives to the end: later collections need not look at it.
                gc.collect()
                gc.freeze()
                _loop(actor, port, reporter.pulse)
            finally:
                reporter.close()
        return outcome.code
    finally:
        port.close()
        trace.close()


def _loop(actor: SyncActor, port: ZmqPort, pulse: Pulse) -> None:
    while not actor.done:
        pulse.beat()
        timeout_ms = _timeout_ms(actor.deadline(), port)
        pulse.rest()
        batch = port.receive(timeout_ms)
        for kind, message in batch:
            pulse.beat()
            actor.receive(kind, message)
            if type(message) is Stop:
                return
        pulse.beat()
        actor.settle()


def _timeout_ms(deadline: int | None, port: Port) -> int:
    """Milliseconds until a deadline, rounded up; -1 for none."""
    return -1 if deadline is None else max(0, -((port.now() - deadline) // 1_000_000))
