"""The supervisor: starts every actor of the host, watches them, and sees that nothing of them remains.

All decisions are ``decide.supervision``'s; this file spawns, polls, sends and kills. It runs in the process of
``edgemesh start``, in the main thread, because the death signal of a child follows the thread that spawned it.
"""

import os
import select
import socket
import time
from pathlib import Path
from typing import Final, Protocol, Self

import msgspec

from edgemesh.decide.supervision import Action, Kill, Note, Send, Stage, Supervision
from edgemesh.runtime.actor import open_trace
from edgemesh.runtime.cards import COST, card_environment, provide
from edgemesh.runtime.clock import monotonic_ns
from edgemesh.runtime.link import LinkError
from edgemesh.runtime.mps import Absent, Mps
from edgemesh.runtime.paths import make_run_dir, new_run_dir, trace_dir
from edgemesh.runtime.process import RUN_MARK, Continued, Exited, Stopped, changes, kill_group, spawn
from edgemesh.runtime.signals import Signals
from edgemesh.runtime.trace import FileTrace
from edgemesh.runtime.zmq import ZmqPort
from edgemesh.topology import Mesh, Topology, derive
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Role

POLL_MS: Final = 100
"""How often deadlines are looked at, and the view is drawn."""

KILLED_S: Final = 5.0
"""How long killed children may take to be gone."""

BACKLOG: Final = 2048


class View(Protocol):
    """What a person sees of a run."""

    def show(self, supervision: Supervision, now: int) -> None:
        """Draw where the mesh stands; called several times a second."""
        ...

    def note(self, supervision: Supervision, note: Note) -> None:
        """Something happened."""
        ...

    def serving(self, url: str, after_ns: int) -> None:
        """Requests may come."""
        ...

    def failed(self, reason: str, log: Path) -> None:
        """The mesh ends because of this; the culprit's own words are in ``log``."""
        ...


class ListenError(Exception):
    """The gateways' address cannot be listened on."""


def supervise(topology: Topology, view: View, *, start_ns: int | None = None, package: str = "edgemesh.actors") -> int:
    """Run a mesh until it ends; returns the exit code (0 only when it was asked to end).

    ``package`` holds the module of each role. Raises ``ListenError``, or ``MpsError`` where two planes must share cards and
    cannot, before any actor is started.
    """
    with Signals() as signals, _listen(topology) as listener:
        gateway = msgspec.structs.replace(topology.gateway, port=listener.getsockname()[1])
        topology = msgspec.structs.replace(topology, gateway=gateway)
        run_dir = new_run_dir(topology.mesh.name)
        mesh = derive(topology, str(run_dir))
        with Reaper(run_dir):
            make_run_dir(run_dir, topology)
            mps = provide(topology, run_dir, dict(os.environ) | {RUN_MARK: str(run_dir)})
            supervisor = Supervisor(mesh, view, signals, listener, start_ns or monotonic_ns(), package, mps)
            try:
                return supervisor.run()
            finally:
                supervisor.close()


class Reaper:
    """The process that outlives this one by a moment. Entered before anything exists that must be cleaned up."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def __enter__(self) -> Self:
        reading, self._pipe = os.pipe2(os.O_CLOEXEC)
        arguments = ["--run-dir", str(self._run_dir), "--pipe", str(reading)]
        null = Path(os.devnull)
        self._pid = spawn("edgemesh.actors.reaper", arguments, log=null, inherit=(reading,), session=True)
        os.close(reading)
        return self

    def __exit__(self, *_: object) -> None:
        """Have it clean up now, and wait until it has."""
        os.close(self._pipe)
        os.waitpid(self._pid, 0)


class Supervisor:
    """One run: its processes, its sockets and its state machine."""

    def __init__(
        self,
        mesh: Mesh,
        view: View,
        signals: Signals,
        listener: socket.socket,
        start_ns: int,
        package: str,
        mps: Mps | Absent | None,
    ) -> None:
        self._mps = mps
        self._mesh, self._view, self._signals, self._listener = mesh, view, signals, listener
        self._name = mesh.actors_of(Role.SUPERVISOR)[0].name
        self._package = package
        self._epoch = 0
        self._start_ns = start_ns
        self._pids: dict[str, int] = {}
        self._stops = 0
        self._announced = False
        self._trace: FileTrace = open_trace(mesh, self._name, self._epoch)
        self._port = ZmqPort(mesh, self._name, self._epoch, self._trace)
        # What was pulled before took no time of the actors'.
        self._supervision = Supervision(mesh, self._epoch, monotonic_ns())
        self._perform(sharing(mps))

    def run(self) -> int:
        """Spawn all, then watch until the last is gone."""
        supervision = self._supervision
        for actor in sorted(supervision.watched.values(), key=lambda each: each.actor.role is not Role.VAULT):
            if not self._signals.stops:
                self._spawn(actor.actor.name)
        while supervision.stage is not Stage.OVER:
            reports = self._port.receive(POLL_MS, also=self._signals.fd)
            self._signals.clear()
            now = monotonic_ns()
            # A kill is the cause of what others then report; an exit follows the actor's own report.
            ended = [(name, change) for name, pid in list(self._pids.items()) for change in changes(pid)]
            self._see([each for each in ended if not _speaks(each[1])], now)
            for _, message in reports:
                self._perform(supervision.heard(message, now))
            self._see([each for each in ended if _speaks(each[1])], now)
            while self._stops < self._signals.stops:
                self._stops += 1
                self._perform(supervision.asked_to_stop(now))
            self._perform(supervision.clock(now))
            self._announce(now)
            self._view.show(supervision, now)
            self._trace.flush()
        self._trace.event("mesh.stopped", reason=supervision.failure)
        return 1 if supervision.failure else 0

    def close(self) -> None:
        """Kill what is left, and wait for it."""
        for pid in self._pids.values():
            kill_group(pid)
        end = time.monotonic() + KILLED_S
        while self._pids and time.monotonic() < end:
            for name, pid in list(self._pids.items()):
                if any(isinstance(change, Exited) for change in changes(pid)):
                    del self._pids[name]
            select.select([self._signals.fd], [], [], POLL_MS / 1000 if self._pids else 0)
            self._signals.clear()
        self._port.close()
        self._trace.close()

    def _spawn(self, name: str) -> None:
        actor = self._mesh.actor(name)
        arguments = ["--run-dir", self._mesh.run_dir, "--name", name, "--epoch", str(self._epoch)]
        inherit: tuple[int, ...] = ()
        if actor.role is Role.GATEWAY:
            inherit = (self._listener.fileno(),)
            arguments += ["--listen", str(inherit[0])]
        log = log_path(self._mesh, name)
        log.unlink(missing_ok=True)
        environment = dict(os.environ) | {"PYTHONFAULTHANDLER": "1", RUN_MARK: self._mesh.run_dir}
        environment |= card_environment(self._mesh.topology, actor, self._mps, Path(self._mesh.run_dir), environment)
        if actor.role is Role.GATEWAY:
            # Its batches are of one text: nothing for threads of the tokenizer's own, one for each core.
            environment |= {"TOKENIZERS_PARALLELISM": "false"}
        if actor.role is Role.RANK:
            # Before torch is imported, or its pools are sized for the whole machine in every rank.
            environment |= {"OMP_NUM_THREADS": str(self._mesh.threads)}
        pid = spawn(f"{self._package}.{actor.role}", arguments, log=log, environment=environment, inherit=inherit)
        self._pids[name] = pid
        self._perform(self._supervision.spawned(name, pid))

    def _see(self, changed: list[tuple[str, Exited | Stopped | Continued]], now: int) -> None:
        for name, change in changed:
            match change:
                case Exited():
                    del self._pids[name]
                    self._perform(self._supervision.exited(name, str(change), now, clean=change.code == 0))
                case Stopped():
                    self._perform(self._supervision.stopped(name, str(change), now))
                case Continued():
                    self._perform(self._supervision.continued(name))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    try:
                        self._port.send(LinkKind.COMMAND, action.message, action.to)
                    except LinkError as error:
                        self._trace.detail("command.unsent", name=action.to, error=str(error))
                case Note():
                    self._trace.event(action.event, **action.fields)
                    self._view.note(self._supervision, action)
                    if action.event == "mesh.failed":
                        log = log_path(self._mesh, self._supervision.culprit)
                        self._view.failed(self._supervision.failure, log)
                case Kill():
                    for name in action.names:
                        if name in self._pids:
                            kill_group(self._pids[name])

    def _announce(self, now: int) -> None:
        if self._announced or self._supervision.stage is not Stage.SERVING:
            return
        self._announced = True
        url, after_ns = url_of(self._mesh.topology), now - self._start_ns
        self._trace.event("mesh.serving", url=url, start_ns=after_ns)
        self._view.serving(url, after_ns)


def sharing(mps: Mps | Absent | None) -> list[Action]:
    """How the planes share each card, for the trace and for who started the mesh."""
    match mps:
        case Mps():
            return [Note("mps.found", {"pipe": str(mps.pipe), "ours": mps.ours})]
        case Absent():
            return [Note("mps.absent", {"reason": mps.reason, "cost": f"no MPS ({mps.reason}): {COST}"})]
        case None:
            return []


def log_path(mesh: Mesh, name: str) -> Path:
    """Where an actor's own output goes."""
    return trace_dir(mesh) / f"{name}.log"


def url_of(topology: Topology) -> str:
    """The address that a client on this machine would use."""
    host, port = topology.gateway.host, topology.gateway.port
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104 - told apart, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(topology: Topology) -> socket.socket:
    """The gateways' listening socket: bound once, here, so that nobody can take the port in between."""
    host, port = topology.gateway.host, topology.gateway.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.settimeout(0)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        text = f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port or --host."
        raise ListenError(text) from error
    return listener


def _speaks(change: Exited | Stopped | Continued) -> bool:
    """Whether the actor had a chance to report why."""
    return isinstance(change, Exited) and change.code >= 0
