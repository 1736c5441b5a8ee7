"""What the operating system has to say about a topology, asked before anything starts."""

import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from edgemesh.topology.config import Topology
from edgemesh.topology.derivation import derive, rank_hosts

ALLOCATOR_KEYS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch reads its allocator's settings; the second is the newer name."""

_EXPANDABLE: Final = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


def preflight(topology: Topology, run_dir: str = "", host: int = 0, devices: Path = Path("/dev")) -> list[str]:
    """Every problem that would stop this topology on this machine, the ``host``-th of the mesh; none: an empty list.

    ``devices`` is where the kernel shows its GPUs.
    """
    problems = [*_model(topology), *_directories(topology, run_dir), *_cards(topology, host, devices)]
    if topology.engine.device == "cuda" and (fault := unshareable(os.environ)):
        problems.append(fault)
    if host == 0:
        problems += [*_gateway(topology)]
    problems += [*_ports(topology, host)]
    return problems


def _gateway(topology: Topology) -> Iterator[str]:
    gateway = topology.gateway
    trouble = _bindable(gateway.host, gateway.port)
    if trouble:
        yield f"gateway.host = {gateway.host!r}, gateway.port = {gateway.port}: {trouble}"
    if gateway.api_keys_file:
        path = Path(gateway.api_keys_file).expanduser()
        if not path.is_file() or not os.access(path, os.R_OK):
            yield f"gateway.api_keys_file = {gateway.api_keys_file!r} is not a file that can be read"


def _ports(topology: Topology, host: int) -> Iterator[str]:
    mesh = derive(topology, "/")
    own = {link.endpoint for link in mesh.links if mesh.actor(link.binder).host == host}
    for endpoint in sorted(endpoint for endpoint in own if endpoint.startswith("tcp://")):
        address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        trouble = _bindable(address.strip("[]"), int(port))
        if trouble:
            yield f"mesh.base_port = {topology.mesh.base_port}: {endpoint}: {trouble}"


def _bindable(host: str, port: int) -> str:
    """Why nobody can listen there, or nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return f"{error.strerror or error}; choose another, or end what uses it"
    return ""


def _model(topology: Topology) -> Iterator[str]:
    path = topology.model.path
    if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().exists():
        yield f"model.path = {path!r} does not exist"


def _cards(topology: Topology, host: int, devices: Path) -> Iterator[str]:
    if topology.engine.device != "cuda" or topology.engine.kind == "null":
        return
    ranks = rank_hosts(topology).count(host)
    found = sum(1 for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())
    if found < ranks:
        yield (
            f'engine.device = "cuda": this machine has {found} NVIDIA GPU{"" if found == 1 else "s"} and would run {ranks}'
            f' rank{"" if ranks == 1 else "s"} of a plane, one per GPU; lower mesh.tp and mesh.dp, or set engine.device = "cpu"'
        )


def unshareable(environment: Mapping[str, str]) -> str:
    """What is set that makes torch allocate memory which other processes cannot open, with the remedy; or nothing."""
    for key in ALLOCATOR_KEYS:
        if _EXPANDABLE.search(environment.get(key, "")):
            return f"{key}={environment[key]}: expandable segments cannot be shared between processes; unset {key}"
    return ""


def _directories(topology: Topology, run_dir: str) -> Iterator[str]:
    for key, value in (("trace.dir", topology.trace.dir), ("the run directory", run_dir)):
        if value and not _writable(Path(value).expanduser()):
            yield f"{key} = {value!r} is not a directory that can be made and written"
    keys = topology.mesh.keys_dir
    if not keys or len(topology.mesh.hosts) == 1:
        return
    path = Path(keys).expanduser()
    if not path.is_dir():
        yield f"mesh.keys_dir = {keys!r} is not a directory"
    elif stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield f"mesh.keys_dir = {keys!r} is open to others; run: chmod 700 {path}"


def _writable(path: Path) -> bool:
    """Whether the nearest part of the path that exists is a directory where this user may write."""
    while not path.exists():
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)
