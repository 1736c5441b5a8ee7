"""The repository's own rules, checked over the syntax tree of every file; each checker is shown a breach first."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgemesh

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "edgemesh").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAX_LINES = 400
MAX_TEST_LINES = 500
# All messages of the mesh stand in one file on purpose: one home for wire types.
LONG = {"edgemesh/wire/messages.py": 700}
MAX_FUNCTION_LINES = 60

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.load",
    "numpy.load",
    "np.load",
}
UNSAFE_METHODS = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized"}
UNSAFE_ARGUMENTS = {"shell", "trust_remote_code", "allow_pickle"}
COLLECTIVES = {
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "isend",
    "irecv",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
}
DEFAULT_GROUP = {"init_process_group", "new_group"}
WIDE_SOCKETS = {"PUB", "SUB", "XPUB", "XSUB", "RADIO", "DISH"}


def name_of(node: ast.AST) -> str:
    """A dotted name, as far as there is one."""
    if isinstance(node, ast.Attribute):
        base = name_of(node.value)
        return f"{base}.{node.attr}" if base else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def unsafe(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What could run someone else's bytes as code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if alias.name.partition(".")[0] in UNSAFE_MODULES]
            yield from ((node.lineno, f"import {name}") for name in found)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNSAFE_MODULES:
            yield node.lineno, f"from {node.module} import"
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            if name in UNSAFE_CALLS or name.rpartition(".")[2] in UNSAFE_METHODS:
                yield node.lineno, f"{name}()"
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in UNSAFE_ARGUMENTS and not off:
                    yield node.lineno, f"{keyword.arg}="


def vague_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Imports that do not say where a name comes from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "a relative import"
            if any(alias.name == "*" for alias in node.names):
                yield node.lineno, "import *"


def default_groups(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Collectives of torch.distributed that do not name their group, and the making of a default one."""
    aliases = {"torch.distributed", "distributed", "dist"}
    direct: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
        if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            direct |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        base, _, name = name_of(node.func).rpartition(".")
        if base not in aliases and not (not base and name in direct):
            continue
        if name in DEFAULT_GROUP:
            yield node.lineno, f"{name}()"
        if name in COLLECTIVES and not any(keyword.arg == "group" for keyword in node.keywords):
            yield node.lineno, f"{name}() without group="


def wide_sockets(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Sockets whose messages reach whoever listens."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, _, kind = name_of(node).rpartition(".")
            if kind in WIDE_SOCKETS and base.rpartition(".")[2] in {"zmq", "SocketType"}:
                yield node.lineno, name_of(node)


def bare_sleeps(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Sleeps that are no pause between two looks of a loop: nothing says that what they wait for has happened."""

    def walk(node: ast.AST, looping: bool) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            looping = False
        looping = looping or isinstance(node, ast.While | ast.For | ast.AsyncFor)
        if isinstance(node, ast.Call) and name_of(node.func) in {"time.sleep", "asyncio.sleep", "anyio.sleep", "sleep"}:
            pause = node.args[0] if node.args else None
            short = not isinstance(pause, ast.Constant) or pause.value <= 0.5
            if not looping or not short:
                yield node.lineno, ast.unparse(node)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, looping)

    yield from walk(tree, looping=False)


def long_functions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Functions that are more than one thought."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines"


HANGING = {"fake.py", "engine_group_worker.py", "test_e2e_failures_clients.py"}
"""Processes that tests ask to hang, and clients that hang up at a random moment: those sleeps wait for nothing."""

CHECKERS = {
    unsafe: [
        "import pickle",
        "import torch, pickle.x as y",
        "from marshal import loads",
        "eval('1')",
        "exec('x')",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=flag)",
        "yaml.load(text)",
        "torch.load(path, weights_only=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "np.load(path, allow_pickle=False)",
        "socket.recv_pyobj()",
        "__import__('x')",
    ],
    vague_imports: ["from os import *", "from . import x", "from .store import y"],
    default_groups: [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch.distributed\ntorch.distributed.broadcast(x, 0)",
        "from torch.distributed import barrier\nbarrier()",
        "import torch.distributed as dist\ndist.init_process_group('nccl')",
        "import torch.distributed as td\ntd.new_group([0])",
    ],
    wide_sockets: ["context.socket(zmq.PUB)", "zmq.SocketType.SUB"],
    bare_sleeps: [
        "time.sleep(1)",
        "def f():\n    time.sleep(0.1)",
        "while x:\n    time.sleep(5)",
        "async def f():\n    await anyio.sleep(0.1)",
        "for x in y:\n    def f():\n        time.sleep(0.1)",
    ],
    long_functions: ["def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES],
}


@pytest.mark.parametrize(
    ("checker", "breach"), [(check, each) for check, breaches in CHECKERS.items() for each in breaches]
)
def test_each_checker_finds_a_breach(checker, breach):
    assert list(checker(ast.parse(breach)))


@pytest.mark.parametrize(
    ("checker", "fine"),
    [
        (unsafe, "subprocess.run(['ls'], shell=False); yaml.safe_load(t); re.compile('x'); ast.literal_eval('1')"),
        (
            default_groups,
            "import torch.distributed as dist\ndist.all_reduce(x, group=g); socket.send(x); self.barrier()",
        ),
        (wide_sockets, "context.socket(zmq.ROUTER); Role.SUB"),
        (bare_sleeps, "while time.monotonic() < due:\n    time.sleep(0.01)"),
    ],
)
def test_no_checker_finds_what_is_allowed(checker, fine):
    assert not list(checker(ast.parse(fine)))


def breaches(checker, paths) -> list[str]:
    found = []
    for path in paths:
        where = path.relative_to(ROOT)
        found += [f"{where}:{line}: {what}" for line, what in checker(ast.parse(path.read_text()))]
    return found


def test_there_are_files_to_check():
    assert len(PACKAGE) > 50
    assert len(TESTS) > 20


@pytest.mark.parametrize("checker", [unsafe, vague_imports, wide_sockets, long_functions])
def test_the_package_keeps_the_rules(checker):
    assert breaches(checker, PACKAGE) == []


def test_every_collective_names_its_group():
    # The load generators measure torch's own way beside ours, default group and all.
    assert breaches(default_groups, [path for path in PACKAGE if "bench" not in path.parts]) == []


@pytest.mark.parametrize("checker", [vague_imports, wide_sockets])
def test_the_tests_keep_the_rules(checker):
    assert breaches(checker, TESTS) == []


def test_no_test_sleeps_to_wait_for_a_state():
    assert breaches(bare_sleeps, [path for path in TESTS if path.name not in HANGING]) == []


def test_no_file_is_too_long_to_be_one_thing():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in PACKAGE + TESTS}
    bounds = {name: LONG.get(name, MAX_TEST_LINES if name.startswith("tests") else MAX_LINES) for name in lengths}
    assert {name: lines for name, lines in lengths.items() if lines > bounds[name]} == {}
    assert LONG.keys() <= lengths.keys()


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def waived(text: str) -> tuple[list[str], bool]:
    """The rules that a comment waives ("" for all of them), and whether it says why."""
    waivers = re.compile(r"noqa(?::\s*(?P<noqa>[A-Z]+\d+(?:,\s*[A-Z]+\d+)*))?|type:\s*ignore(?:\[(?P<ignore>[^]]*)\])?")
    rules = [match["noqa"] or match["ignore"] or "" for match in waivers.finditer(text)]
    return rules, bool(re.search(r"\w", waivers.sub("", text)))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# noqa: S603 - our own command", (["S603"], True)),
        ("# noqa: S603", (["S603"], False)),
        ("# noqa", ([""], False)),
        ("# noqa: EM102, TRY003 - typer prints it", (["EM102, TRY003"], True)),
        ("# type: ignore[arg-type]  # its union has it", (["arg-type"], True)),
        ("# type: ignore[attr-defined]  # noqa: SLF001", (["attr-defined", "SLF001"], False)),
        ("# a remark", ([], True)),
    ],
)
def test_waivers_are_told_from_their_reasons(text, found):
    assert waived(text) == found


def test_every_waiver_has_its_reason():
    found = []
    for path in PACKAGE:
        explained: set[str] = set()
        for line, text in comments(path):
            rules, reasoned = waived(text)
            # The same waiver may stand again below its reason.
            if rules and ("" in rules or not (reasoned or explained >= set(rules))):
                found.append(f"{path.relative_to(ROOT)}:{line}: {text}")
            explained |= set(rules) if reasoned else set()
    assert found == []


def test_nothing_is_left_for_later():
    later = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in PACKAGE + TESTS
        for line, text in comments(path)
        if later.search(text)
    ]
    assert found == []


def test_the_layout_names_every_package_and_nothing_else():
    layout = (edgemesh.__doc__ or "").partition("::\n")[2].partition("\n\nOne request")[0]
    named = re.findall(r"^    (\w+)  ", layout, re.MULTILINE)
    packages = [path.parent.name for path in (ROOT / "edgemesh").glob("*/__init__.py")]
    assert Counter(named) == Counter(packages)


def test_the_walk_names_only_what_exists():
    walk = (edgemesh.__doc__ or "").partition("One request's walk")[2]
    names = re.findall(r"``((?:actors|decide|api|engine|runtime)(?:\.\w+)*)``", walk)
    assert len(names) >= 6
    for name in names:
        path = ROOT / "edgemesh" / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_every_module_says_what_it_is():
    silent = [str(path.relative_to(ROOT)) for path in PACKAGE if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_every_role_has_one_file_of_its_own():
    from edgemesh.wire.ids import Role

    assert {role for role in Role if not (ROOT / f"edgemesh/actors/{role.value}.py").is_file()} == set()


def test_no_two_test_files_share_a_name():
    names = Counter(path.name for path in TESTS if path.name not in {"conftest.py", "__init__.py"})
    assert [name for name, count in names.items() if count > 1] == []
    beside = [path for path in TESTS if path.name.startswith("test_") and (path.parent / "__init__.py").exists()]
    assert beside == []
