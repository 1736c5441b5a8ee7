"""The gateway: HTTP on one side, the mesh on the other, and nothing of one reaches the other unchecked.

A request's way: ``gateway_app`` (route) -> ``gateway_service`` (check, tokenise) -> ``gateway_streams`` (submit; what the
groups say comes back here) -> ``gateway_answer`` (detokenise, cut, send). One process is one asyncio loop; several
processes share the port.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final, assert_never

import anyio
import msgspec
import uvicorn
import uvloop
from anyio.abc import TaskGroup
from prometheus_client import disable_created_metrics

from edgemesh import __version__
from edgemesh.actors.gateway_app import Application
from edgemesh.actors.gateway_constraints import Constraints, checker
from edgemesh.actors.gateway_http import TOGETHER, Bodies
from edgemesh.actors.gateway_keys import KeyWatch, key_file_of, key_limits_of
from edgemesh.actors.gateway_metrics import Metrics
from edgemesh.actors.gateway_protocol import Bounds, protocol_of
from edgemesh.actors.gateway_quota import Quotas
from edgemesh.actors.gateway_service import Model, Service
from edgemesh.api.dialect import ReasoningParser, ToolParser
from edgemesh.api.errors import unavailable
from edgemesh.api.limits import Limits, limits_of
from edgemesh.api.text import MAX_FILE_BYTES, ModelText
from edgemesh.runtime.actor import Arguments, default_plane, faults_told, open_trace, parse_arguments, supervisor_of
from edgemesh.runtime.ledger import Ledger
from edgemesh.runtime.paths import read_mesh, trace_dir
from edgemesh.runtime.progress import Pulse, Reporter
from edgemesh.runtime.zmq import ZmqPort
from edgemesh.runtime.zmq_async import AsyncPort
from edgemesh.topology import Mesh
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Phase
from edgemesh.wire.messages import (
    Accepted,
    Begin,
    Capacity,
    Drain,
    Drained,
    Emit,
    Failed,
    Health,
    Hello,
    Mark,
    Ready,
    Rejected,
    Stop,
)

GatewayInbox = Rejected | Accepted | Emit | Failed | Begin | Health | Drain | Stop

SWEEP_S: Final = 0.1
"""How often what no event drives is looked at: full links, slow clients, the end of a drain."""

BACKLOG: Final = 2048
SEND_BUFFER: Final = 128 << 10
"""Bytes that the kernel holds for one client; left to itself it would take megabytes for each that does not read."""

USER_TIMEOUT_MS: Final = 30_000
"""How long the kernel keeps a connection whose peer acknowledges nothing."""

SLOW_CLIENT_S: Final = 30.0
"""How long a client may leave unread what it is sent."""

OWN_DESCRIPTORS: Final = 512
"""Descriptors kept for links, files, and clients that are told that there are too many."""

SWITCH_S: Final = 0.001
"""How long a worker thread may go on where the event loop waits for the interpreter's lock; there may be several of them."""

CLOSE_S: Final = 2
"""How long answers may take to leave at the end."""


class GatewayActor:
    """One gateway's life: it follows the supervisor, and hands what groups say to the streams."""

    def __init__(self, mesh: Mesh, name: str, epoch: int, port: AsyncPort, url: str) -> None:
        settings = mesh.topology.gateway
        self.mesh = mesh
        self.name = name
        self.epoch = epoch
        self.port = port
        self.url = url
        self.supervisor = supervisor_of(mesh, name)
        index, shared = mesh.actor(name).index, settings.processes > 1
        metrics = Metrics(name, Path(mesh.run_dir) / "metrics" if shared else None)
        ledger = Ledger(Path(mesh.run_dir) / "ledger" if shared else None, index, settings.processes)
        self.key_watch = KeyWatch(key_file_of(settings), key_limits_of(settings), port.trace)
        self.bounds = bounds_of(mesh, metrics)
        self.service = Service(
            port,
            index=index,
            metrics=metrics,
            keys=self.key_watch.keys,
            quotas=Quotas(ledger, port.now, metrics.limited),
            bodies=Bodies(settings.max_body_bytes, TOGETHER * settings.max_body_bytes, settings.body_timeout_s),
            max_streams=settings.max_streams,
            timeout_s=settings.request_timeout_s,
        )
        metrics.watch("edgemesh_api_keys", "API keys that may be used.", lambda: len(self.key_watch.keys))
        metrics.watch("edgemesh_api_keys_stale", "1: the changed key file is unusable.", lambda: self.key_watch.stale)
        metrics.watch("edgemesh_open_connections", "Connections of clients.", lambda: len(self.bounds.connections))
        self.stopped = False
        self._draining = False
        self._drained = False
        self._marks = self._mark(Phase.STARTING)

    async def follow(self, tasks: TaskGroup) -> None:
        """Take what the mesh sends until it says Stop."""
        while not self.stopped:
            for _, message in await self.port.receive():
                self._take(message, tasks)  # type: ignore[arg-type]  # the links' unions make up GatewayInbox

    async def sweep(self, pulse: Pulse) -> None:
        """Look after what no message drives; each round shows that the loop turns."""
        while not self.stopped:
            pulse.beat()
            await anyio.sleep(SWEEP_S)
            self.service.streams.retry()
            self.service.metrics.share()
            if self._draining and not self._drained and self.service.idle:
                self._drained = True
                self.port.send(LinkKind.REPORT, Drained(self.name, self.epoch), self.supervisor)
        pulse.rest()

    def marks(self) -> tuple[Mark, ...]:
        """Where this gateway stands; read by the progress thread."""
        return self._marks

    def _take(self, message: GatewayInbox, tasks: TaskGroup) -> None:
        match message:
            case Emit() | Accepted() | Failed() | Rejected():
                self.service.streams.receive(message)
            case Begin():
                tasks.start_soon(self._begin, message)
            case Health():
                self._health(message)
            case Drain():
                self._draining = True
                self.service.serving = False
                self.service.reason = "the server is shutting down"
                self.bounds.drain()
                self._marks = self._mark(Phase.DRAINING)
            case Stop():
                self.stopped = True
                self.service.serving = False
                if not self._draining:  # what ended the drain is nothing to clients: the server shuts down
                    self.service.reason = message.reason or "the server is stopping"
                self.service.streams.fail_all(unavailable(f"the server stopped: {message.reason or 'it was told to'}"))
            case _:
                assert_never(message)

    async def _begin(self, message: Begin) -> None:
        """Load the tokenizer in a thread, so that ``/health`` goes on answering."""
        topology = self.mesh.topology
        self._marks = self._mark(Phase.LOADING)
        directory, settings = Path(self.mesh.run_dir) / "model", topology.model
        text = await anyio.to_thread.run_sync(load_text, directory, settings.tool_parser, settings.reasoning_parser)
        served = topology.model.served_name or Path(topology.model.path).name
        limits = limits_of(message.capacity, served, topology.mesh.dp)
        fingerprint = fingerprint_of(self.mesh, message.capacity)
        self.service.model = Model(text, limits, fingerprint, constraints_of(self.mesh, self.name, limits))
        # What is alive now lives to the end: later collections need not look at it.
        gc.collect()
        gc.freeze()
        self._marks = self._mark(Phase.WAITING)
        self.service.reason = "the mesh is starting"
        self.port.send(LinkKind.REPORT, Ready(self.name, self.epoch, self.url), self.supervisor)

    def _health(self, message: Health) -> None:
        service = self.service
        service.serving = message.serving and not self._draining
        if service.serving:
            service.reason = ""
            return
        service.reason = message.reason or service.reason or "the mesh is not serving"
        if not message.draining and not self._draining:
            service.streams.fail_all(unavailable(f"the mesh failed: {service.reason}"))

    def _mark(self, phase: Phase) -> tuple[Mark, ...]:
        return (Mark(default_plane(self.mesh, self.name), 0, phase, time.monotonic_ns(), 0),)


def bounds_of(mesh: Mesh, metrics: Metrics) -> Bounds:
    """What the topology and this process's descriptors allow of connections."""
    settings = mesh.topology.gateway
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OWN_DESCRIPTORS
    return Bounds(
        max_connections=max(1, min(settings.max_connections, descriptors)),
        head_s=settings.head_timeout_s,
        stall_s=min(SLOW_CLIENT_S, mesh.topology.group.credit_deadline_s / 2),
        tell=metrics.ended,
    )


class HttpServer(uvicorn.Server):
    """uvicorn, without hands on the process's signals: the supervisor ends a gateway by its messages."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def fingerprint_of(mesh: Mesh, capacity: Capacity) -> str:
    """A name of everything that may change what a seed gives: the release, the model, and how it is cut and computed."""
    topology = mesh.topology
    cut = (
        topology.mesh,
        topology.model,
        topology.engine,
        topology.attn_tp,
        capacity.weights_bytes,
        capacity.vocab_size,
    )
    return "fp_" + hashlib.sha256(msgspec.json.encode((__version__, *cut))).hexdigest()[:12]


def constraints_of(mesh: Mesh, name: str, limits: Limits) -> Constraints:
    """What tries out the grammars of this gateway's requests, once there are any."""
    tokenizer = Path(mesh.run_dir) / "model" / "tokenizer.json"
    log = trace_dir(mesh) / f"{name}.checker.log"
    return Constraints(checker(tokenizer, limits.vocab_size, limits.eos_token_ids, log))


def load_text(directory: Path, tools: ToolParser = "auto", reasoning: ReasoningParser = "auto") -> ModelText:
    """The tokenizer and template that the vault left there, and the parsers of what the model says. Raises ``OSError`` and ``ValueError``."""
    config = directory / "tokenizer_config.json"
    template = directory / "chat_template.jinja"
    return ModelText(
        _read(directory / "tokenizer.json"),
        _read(config) if config.exists() else b"",
        _read(template).decode() if template.exists() else None,
        clock=time.monotonic_ns,
        now=lambda: datetime.now().astimezone(),
        tool_parser=tools,
        reasoning_parser=reasoning,
    )


def _read(path: Path) -> bytes:
    if path.stat().st_size > MAX_FILE_BYTES:
        message = f"{path} is larger than {MAX_FILE_BYTES} bytes"
        raise ValueError(message)
    return path.read_bytes()


def listening_socket(mesh: Mesh, descriptor: int) -> socket.socket:
    """The socket that the supervisor opened, or one of our own. Raises ``OSError`` where the port is taken."""
    settings = mesh.topology.gateway
    if descriptor >= 0:
        bound = socket.socket(fileno=descriptor)
    else:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.processes > 1:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((settings.host, settings.port))
    # Accepted sockets inherit all of these.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    bound.setblocking(False)  # noqa: FBT003 - the standard library takes it by position
    return bound


def _alone(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception in a group that holds only one."""
    first = group.exceptions[0]
    return _alone(first) if isinstance(first, BaseExceptionGroup) else first


async def serve(mesh: Mesh, arguments: Arguments, raw: ZmqPort, reporter: Reporter) -> None:
    """Run the gateway until it is told to stop."""
    bound = listening_socket(mesh, arguments.listen)
    host, port = bound.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    async with AsyncPort(raw) as links, anyio.create_task_group() as tasks:
        actor = GatewayActor(mesh, arguments.name, arguments.epoch, links, url)
        reporter.follow(actor.marks)
        config = uvicorn.Config(
            Application(actor.service, mesh.topology.gateway.allowed_origins),
            http=protocol_of(actor.bounds),
            ws="none",
            lifespan="off",
            access_log=False,
            proxy_headers=False,
            log_config=None,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=mesh.topology.gateway.keep_alive_s,  # type: ignore[arg-type]  # a timer's seconds
            timeout_graceful_shutdown=CLOSE_S,
        )
        server = HttpServer(config)
        tasks.start_soon(actor.sweep, reporter.pulse)
        tasks.start_soon(server.serve, [bound])
        async with anyio.create_task_group() as watching:
            watching.start_soon(actor.key_watch.follow)
            await actor.follow(tasks)
            watching.cancel_scope.cancel()
        server.should_exit = True
        if actor.service.model is not None and actor.service.model.constraints is not None:
            actor.service.model.constraints.close()


def main() -> None:
    """The whole process."""
    arguments = parse_arguments()
    sys.setswitchinterval(SWITCH_S)
    # A stream is a socket, and the usual soft limit is 1,024 of them.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the package leaves it untyped
    name, epoch = arguments.name, arguments.epoch
    mesh = read_mesh(arguments.run_dir)
    trace = open_trace(mesh, name, epoch)
    raw = ZmqPort(mesh, name, epoch, trace)
    supervisor = supervisor_of(mesh, name)
    try:
        with faults_told(raw, supervisor) as outcome:
            raw.send(LinkKind.REPORT, Hello(name, epoch, os.getpid()), supervisor)
            reporter = Reporter(mesh, raw)
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(serve(mesh, arguments, raw, reporter))
            except ExceptionGroup as group:
                raise _alone(group) from group
            finally:
                reporter.close()
    finally:
        raw.close()
        trace.close()
    sys.exit(outcome.code)


if __name__ == "__main__":
    main()
