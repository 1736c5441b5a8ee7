"""Where a run keeps its sockets, and where its traces stay: private directories with short names."""

import os
import secrets
import stat
import tempfile
from pathlib import Path

import msgspec

from edgemesh.topology import Mesh, Topology, derive

TOPOLOGY = "topology.json"


def new_run_dir(mesh_name: str) -> Path:
    """A name for a run's directory that nobody else has: under ``XDG_RUNTIME_DIR`` if that is ours alone, else /tmp.

    It is not made yet, so that whoever removes it can be started before it exists.
    """
    return _root() / f"em-{mesh_name[:16]}-{secrets.token_hex(4)}"


def make_run_dir(run_dir: Path, topology: Topology) -> None:
    """Make the directory, readable by its owner alone, with the resolved topology in it."""
    run_dir.mkdir(mode=0o700)
    for part in ("sock", "coll"):
        (run_dir / part).mkdir(mode=0o700)
    (run_dir / TOPOLOGY).write_bytes(msgspec.json.encode(topology))


def read_mesh(run_dir: Path) -> Mesh:
    """The mesh that this run's supervisor derived."""
    topology = msgspec.json.decode((run_dir / TOPOLOGY).read_bytes(), type=Topology)
    return derive(topology, str(run_dir))


def trace_dir(mesh: Mesh) -> Path:
    """Where the actors of a mesh write their traces."""
    named = mesh.topology.trace.dir
    return Path(named).expanduser() if named else Path(mesh.run_dir) / "trace"


def state_dir() -> Path:
    """Where traces of past runs are kept for ``edgemesh trace``: one directory a run."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "edgemesh" / "trace"


def _root() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and len(runtime) <= 32 and Path(runtime).is_dir():
        found = Path(runtime).stat()
        if found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077:
            return Path(runtime)
    return Path(tempfile.gettempdir() if len(tempfile.gettempdir()) <= 32 else "/tmp")  # noqa: S108 - a private directory is made in it
