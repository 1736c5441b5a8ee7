"""``edgemesh start``: from a topology file and a model to a mesh that serves."""

import fcntl
import ipaddress
import os
import resource
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console

from edgemesh.actors.gateway_keys import ENVIRONMENT, key_file_of
from edgemesh.actors.supervisor import ListenError, supervise
from edgemesh.cli.errors import complain, fail
from edgemesh.cli.start_view import LiveView, PlainView
from edgemesh.runtime.cards import MpsError
from edgemesh.runtime.clock import monotonic_ns
from edgemesh.runtime.link import LinkError
from edgemesh.runtime.paths import state_dir
from edgemesh.topology import Topology, TopologyError, load, preflight

KEPT_TRACES: Final = 20
"""Runs whose traces are kept in the state directory; the oldest beyond them go."""

KEYS_HINT: Final = f"name a file of keys (--set gateway.api_keys_file=FILE) or set {ENVIRONMENT}."


def start(
    topology: Annotated[
        str, typer.Option(help="A topology file, or the name of a shipped one (demo, tp8-dp2, ...).")
    ] = "demo",
    model: Annotated[
        str, typer.Option(help="A pulled model, a Hugging Face directory or id, a GGUF file.", show_default=False)
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.", show_default=False)] = "",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.", show_default=False)
    ] = None,
    trace_dir: Annotated[Path | None, typer.Option(help="Where traces go.", show_default=False)] = None,
    served_name: Annotated[str, typer.Option(help="The model's name in the API.", show_default=False)] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value over the file's; repeatable.", show_default=False),
    ] = None,
) -> None:
    """Start a mesh and serve the OpenAI API."""
    start_ns = monotonic_ns()
    options = {"model.path": model, "gateway.host": host, "gateway.port": port, "model.served_name": served_name}
    options["trace.dir"] = str(trace_dir.absolute()) if trace_dir is not None else ""
    given = [f"{key}={_toml(value)}" for key, value in options.items() if value not in {"", None}]
    console = Console(stderr=True)
    try:
        wanted = prepare(load(topology, [*(overrides or ()), *given]), console)
    except (TopologyError, OSError) as error:
        raise fail(str(error), 2) from error
    if open_to_all(wanted, os.environ):
        complain(
            "note",
            f"{wanted.gateway.host} may be reached from other machines, and no API key is asked for: {KEYS_HINT}",
        )
    with closing(LiveView(console) if console.is_terminal else PlainView(console)) as view:
        try:
            code = supervise(wanted, view, start_ns=start_ns)
        except (ListenError, LinkError, MpsError, OSError) as error:
            raise fail(str(error)) from error
    raise typer.Exit(code)


def open_to_all(topology: Topology, environment: Mapping[str, str]) -> bool:
    """Whether anyone on the network may use the API."""
    if topology.gateway.api_keys_file or environment.get(ENVIRONMENT, "").strip():
        return False
    try:
        return not ipaddress.ip_address(topology.gateway.host).is_loopback
    except ValueError:
        return topology.gateway.host != "localhost"


def prepare(topology: Topology, console: Console) -> Topology:
    """Everything that can be known to fail before a process is started; the topology with its paths resolved.

    Raises ``TopologyError``, and ``OSError`` where traces cannot be kept.
    """
    if len(topology.mesh.hosts) > 1:
        hosts = ", ".join(topology.mesh.hosts)
        text = f"mesh.hosts names {len(topology.mesh.hosts)} machines ({hosts}); edgemesh start runs the mesh of one."
        raise TopologyError(text)
    problems = preflight(topology)
    if problems:
        raise TopologyError("; ".join(problems) + ".")
    try:
        key_file_of(topology.gateway).read()
    except ValueError as error:
        raise TopologyError(str(error)) from error
    _raise_descriptor_limit()
    topology = _with_model(topology, console)
    if not topology.trace.dir:
        trace = msgspec.structs.replace(topology.trace, dir=str(_new_trace_dir(topology.mesh.name)))
        topology = msgspec.structs.replace(topology, trace=trace)
    return topology


def _with_model(topology: Topology, console: Console) -> Topology:
    """Name the model's directory; what has a name to pull by is pulled if it is not there."""
    from edgemesh.cli.pull import PullError, fetch  # noqa: PLC0415 - only when there is a model to find
    from edgemesh.engine.locate import locate, to_be_pulled  # noqa: PLC0415
    from edgemesh.engine.shape import ModelError  # noqa: PLC0415

    name = topology.model.path
    try:
        directory = fetch(name, console) if to_be_pulled(name) else locate(name)
    except (ModelError, PullError) as error:
        raise TopologyError(str(error)) from error
    served = topology.model.served_name or Path(name).name.removesuffix(".gguf")
    model = msgspec.structs.replace(topology.model, path=str(directory), served_name=served)
    return msgspec.structs.replace(topology, model=model)


def _new_trace_dir(mesh_name: str) -> Path:
    """A directory of its own for this run, held for as long as the process lives; the oldest of too many are removed."""
    runs = state_dir()
    runs.mkdir(parents=True, exist_ok=True)
    ages = []
    for path in runs.iterdir():
        with suppress(FileNotFoundError):  # another start removes old ones, too
            if path.is_dir():
                ages.append((path.stat().st_mtime, path))
    for _, old in sorted(ages)[: max(0, len(ages) + 1 - KEPT_TRACES)]:
        with suppress(FileNotFoundError):
            held = _hold(old)
            if held is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(held)
    fresh = runs / f"{mesh_name}-{monotonic_ns():x}"
    fresh.mkdir(mode=0o700)
    _hold(fresh)
    return fresh


def _hold(directory: Path) -> int | None:
    """Lock a run's directory; None where its run still lives. The lock goes with the descriptor, so with the process."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _raise_descriptor_limit() -> None:
    """Streams and links are descriptors; take all that the system grants."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _toml(value: object) -> str:
    """A value for ``--set``: text quoted, so that it stays text."""
    return msgspec.json.encode(value).decode()
