import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from edgemesh.runtime.paths import make_run_dir
from edgemesh.runtime.trace import ListTrace
from edgemesh.runtime.zmq import ZmqPort
from edgemesh.topology import Mesh, Topology, derive, parse


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory with a name short enough for sockets."""
    scratch = Path(tempfile.mkdtemp(prefix="emt", dir="/tmp"))
    yield scratch / "em-test"
    shutil.rmtree(scratch)


@pytest.fixture
def make_mesh(run_dir: Path) -> Callable[..., Mesh]:
    """A mesh from overrides, with its run directory made."""

    def make(*overrides: str) -> Mesh:
        topology: Topology = parse("", overrides)
        trace = msgspec.structs.replace(topology.trace, dir=str(run_dir / "trace"))
        topology = msgspec.structs.replace(topology, trace=trace)
        make_run_dir(run_dir, topology)
        return derive(topology, str(run_dir))

    return make


@pytest.fixture
def mesh(make_mesh: Callable[..., Mesh]) -> Mesh:
    """Two coupled groups of two ranks, unified, with two gateways."""
    return make_mesh("mesh.tp=4", "mesh.dp=2", "mesh.split=false", "gateway.processes=2")


@pytest.fixture
def port_of(mesh: Mesh) -> Iterator[Callable[..., ZmqPort]]:
    """Ports of this mesh, closed at the end; their traces are lists."""
    ports: list[ZmqPort] = []

    def make(name: str, epoch: int = 0, **options: object) -> ZmqPort:
        port = ZmqPort(mesh, name, epoch, ListTrace(), **options)
        ports.append(port)
        return port

    yield make
    for port in reversed(ports):
        port.close()
