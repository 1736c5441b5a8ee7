"""Real meshes with a real model, each started at most once a session, and looked for leftovers when it has ended."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_clients import Traces
from e2e_reference import compute, constrain

from edgemesh.bench.launch import Launched
from edgemesh.engine.locate import models_dir

START_S = 180.0
MODEL = "smollm2-135m"

SHAPES = {
    "tp1": {"mesh.tp": 1, "mesh.dp": 1},
    "tp2": {"mesh.tp": 2, "mesh.dp": 1},
    "plain-dp2": {"mesh.tp": 1, "mesh.dp": 2, "mesh.attn_tp": 1},
    "tp2-dp2": {"mesh.tp": 2, "mesh.dp": 2},
    "tp4-dp2": {"mesh.tp": 4, "mesh.dp": 2},
    "tp8-dp2": {"mesh.tp": 8, "mesh.dp": 2},
    # Four groups whose ranks answer at once: for all that does not depend on what the network says.
    "null-dp4": {"mesh.tp": 4, "mesh.dp": 4, "engine.kind": "null"},
}
COMMON = {
    "model.dtype": "float32",
    "engine.threads": 1,
    "engine.kv_pages": 384,
    "prefill.chunk_tokens": 96,
    "decode.slots": 64,
    "trace.max_bytes": 1 << 30,
    "supervisor.start_deadline_s": START_S,
    # A machine may be too busy for an actor to be heard; one that ends, stops or hangs is seen by other means.
    "supervisor.silence_s": 60,
    "supervisor.report_ms": 100,
}


def overrides_of(shape, *, split, **overrides):
    own = {key.replace("__", "."): value for key, value in overrides.items()}
    return COMMON | SHAPES[shape] | {"mesh.name": "e2e", "mesh.split": split} | own


@pytest.fixture(scope="session", autouse=True)
def pulled():
    """The demo model lies in the user's cache, as `make test` leaves it there."""
    command = [str(Path(sys.executable).with_name("edgemesh")), "pull", MODEL]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="session")
def cases(pulled):
    """What `transformers` says of the demo model's prompts."""
    (gguf,) = (models_dir() / MODEL).glob("*.gguf")
    return compute(gguf)


@pytest.fixture(scope="session")
def constrained(pulled):
    """What it says where its output must match a pattern."""
    (gguf,) = (models_dir() / MODEL).glob("*.gguf")
    return constrain(gguf)


@contextlib.contextmanager
def running(shape, *, split=True, **overrides):
    """A mesh that serves; ended by SIGTERM if it still runs, and checked for leftovers."""
    launched = Launched("demo", overrides_of(shape, split=split, **overrides))
    try:
        launched.wait_healthy(START_S)
        yield launched
        code = launched.stop()
        assert code == 0, launched.tell(f"ended with {code}")
        assert launched.leftovers() == [], launched.tell("left something behind")
    finally:
        launched.close()


@pytest.fixture(scope="session")
def mesh(pulled):
    """``mesh(shape, split=..., **overrides)``: that mesh, running. Another one stops it: two would not fit the cores."""
    held = {}
    with contextlib.ExitStack() as stack:

        def get(shape, *, split=True, **overrides):
            key = (shape, split, *sorted(overrides.items()))
            if held.get("key") != key:
                held.clear()
                stack.pop_all().close()
                held["mesh"] = stack.enter_context(running(shape, split=split, **overrides))
                held["key"] = key
            return held["mesh"]

        yield get


@pytest.fixture
def served(request, mesh):
    """The running mesh that the parameter names: ``"tp2-dp2 split"``."""
    shape, planes = request.param.split()
    return mesh(shape, split={"split": True, "unified": False}[planes])


@pytest.fixture
def traces(served):
    """What the mesh traces during this test; after it nothing runs any more, every page is back, and nothing was broken."""
    found = Traces(served)
    yield found
    found.settle()
    broken = list(found.events("request.broken", "link.undecodable", "link.refused", "epoch.stale"))
    assert not broken, broken


@pytest.fixture
def fresh(pulled):
    """``fresh(shape, ...)``: a mesh of this test alone, for tests that end it; the test checks how it ended."""
    with contextlib.ExitStack() as stack:

        def get(shape, *, split=True, healthy=True, port=0, **overrides):
            launched = Launched("demo", overrides_of(shape, split=split, **overrides), port=port)
            stack.callback(launched.close)
            if healthy:
                launched.wait_healthy(START_S)
            return launched

        yield get


def pytest_runtest_makereport(item, call):
    """A failure shows the ends of the mesh's logs and traces."""
    if call.when == "call" and call.excinfo is not None:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Launched):
                item.add_report_section("call", "mesh", value.tell("the mesh of this test"))


def _mesh_of(item):
    return item.callspec.params.get("served", "") if hasattr(item, "callspec") else ""


def pytest_collection_modifyitems(items):
    """Tests that end their mesh come first, then those that share one, mesh by mesh, so that each starts once.

    Of those, the ones that compare tokens come first: they need a mesh whose prefix cache has seen nothing.
    """
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    others = [item for item in items if here not in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.e2e)
    mine.sort(key=lambda item: (_mesh_of(item), item.path.name != "test_e2e_tokens.py"))
    items[:] = others + mine
