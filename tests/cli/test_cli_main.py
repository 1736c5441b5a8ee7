"""The program as a user meets it: quick, torch-free, and one paragraph when something is wrong."""

import os
import subprocess
import sys

import pytest

from edgemesh import __version__
from edgemesh.api.keys import KeyLimits, Keyring, parse_keys
from edgemesh.cli import main, start
from edgemesh.cli.start_view import failure, last_line
from edgemesh.topology import TopologyError, parse

LOADED = """
import runpy, sys
sys.argv = ["edgemesh", *sys.argv[1:]]
try:
    runpy.run_module("edgemesh.cli.main", run_name="__main__")
finally:
    print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "duckdb", "zmq"}))
"""


def edgemesh(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgemesh.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_help_names_every_command_and_imports_none():
    done = subprocess.run([sys.executable, "-c", LOADED, "--help"], capture_output=True, text=True, check=True)
    for name in main.COMMANDS:
        assert f" {name} " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_version():
    assert edgemesh("--version").stdout.strip() == f"edgemesh {__version__}"


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_has_help_of_its_own(name):
    done = subprocess.run([sys.executable, "-c", LOADED, name, "--help"], capture_output=True, text=True, check=True)
    assert f"edgemesh {name}" in done.stdout
    assert "torch" not in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology", "tp99"], "no shipped topology is called 'tp99'; there are demo,"),
        (["--topology", "/nowhere.toml"], "cannot read the topology file /nowhere.toml: No such file"),
        (["--set", "mesh.tq=2"], "did you mean 'mesh.tp'?"),
        (["--set", "mesh.tp=3", "--set", "mesh.dp=2"], "tp"),
        (["--model", "/nowhere/model"], "model.path = '/nowhere/model' does not exist"),
        (["--model", "nobodys-model"], "models to pull by name: smollm2-135m"),
        (["--host", "203.0.113.1"], "Cannot assign requested address; choose another"),
    ],
)
def test_what_is_wrong_is_said_in_one_paragraph_before_anything_starts(arguments, words, tmp_path):
    done = edgemesh("start", "--port", "0", "--trace-dir", str(tmp_path), *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_several_hosts_are_refused(tmp_path):
    topology = parse("", ["mesh.tp=2", "mesh.hosts=['10.0.0.1', '10.0.0.2']", f"mesh.keys_dir={tmp_path}"])
    with pytest.raises(TopologyError, match=r"2 machines \(10\.0\.0\.1, 10\.0\.0\.2\)"):
        start.prepare(topology, None)


def test_only_so_many_old_traces_are_kept_beside_those_of_live_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(start, "KEPT_TRACES", 3)
    runs = tmp_path / "edgemesh" / "trace"
    for age in range(6):
        (runs / f"run-{age}").mkdir(parents=True)
        os.utime(runs / f"run-{age}", (1000 - age, 1000 - age))
    live = start._hold(runs / "run-5")
    first = start._new_trace_dir("demo")
    assert sorted(runs.iterdir()) == sorted([first, runs / "run-0", runs / "run-1", runs / "run-5"])
    os.close(live)


def test_a_failure_quotes_the_culprits_last_line(tmp_path):
    log = tmp_path / "rank-0.log"
    assert last_line(log) == ""
    assert failure("it died", log) == "it died."
    log.write_text("x" * 10_000 + "\nModuleNotFoundError: No module named 'torch'\n\n")
    assert failure("it died", log) == f"it died. Its last line in {log}: ModuleNotFoundError: No module named 'torch'"


@pytest.mark.parametrize(
    "arguments",
    [
        ["pull", "{}"],
        ["start", "--topology", "{}"],
        ["start", "--model", "{}"],
        ["doctor", "--set", "mesh.name={}"],
        ["topology", "check", "{}"],
        ["topology", "show", "demo", "--set", "model.{}=1"],
        ["trace", "requests", "--dir", "{}"],
        ["bench", "serve", "--url", "{}"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_words_from_elsewhere_are_neither_markup_nor_commands_to_the_terminal(arguments):
    done = edgemesh(*(each.format("[/red]\x1b[31m[bold]") for each in arguments))
    assert done.returncode in {1, 2}
    assert "[/red]" in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr


def test_a_failure_is_one_paragraph_whatever_it_quotes(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_text("\x1b]0;mine\x07\x9b31m\n")
    said = failure("it said \x1b[2J\nand more", log)
    assert said.isprintable()
    assert said.startswith("it said \\x1b[2J\\nand more. Its last line in ")


@pytest.mark.parametrize(
    ("host", "keys", "told"),
    [
        ("127.0.0.1", {}, False),
        ("127.8.0.1", {}, False),
        ("::1", {}, False),
        ("localhost", {}, False),
        ("0.0.0.0", {}, True),
        ("::", {}, True),
        ("10.0.0.7", {}, True),
        ("box.example", {}, True),
        ("0.0.0.0", {start.ENVIRONMENT: "one"}, False),
        ("0.0.0.0", {start.ENVIRONMENT: ""}, True),
    ],
)
def test_an_api_that_anyone_may_use_is_told(host, keys, told):
    topology = parse("", [f"gateway.host={host}"])
    assert start.open_to_all(topology, keys) is told
    named = parse("", [f"gateway.host={host}", "gateway.api_keys_file=/keys"])
    assert not start.open_to_all(named, keys)


def test_traces_that_cannot_be_kept_are_one_paragraph(tmp_path):
    (tmp_path / "edgemesh").write_text("a file in the way")
    (tmp_path / "config.json").write_text("{}")
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "edgemesh.cli.main", "start", "--port", "0", "--model", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 2
    assert "Not a directory" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_runs_that_another_start_removes_meanwhile_are_no_matter(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(start, "KEPT_TRACES", 1)
    runs = tmp_path / "edgemesh" / "trace"
    for name in ("a", "b"):
        (runs / name).mkdir(parents=True)
    hold = start._hold

    def meanwhile(directory):
        if directory.name == "a":
            directory.rmdir()
        return hold(directory)

    monkeypatch.setattr(start, "_hold", meanwhile)
    fresh = start._new_trace_dir("demo")
    assert list(runs.iterdir()) == [fresh]


def test_a_new_api_key_is_known_by_its_line_and_by_nothing_else(tmp_path):
    said = edgemesh("api", "key", "--name", "agents", "--max-requests", "3").stdout.splitlines()
    (known,) = parse_keys(said[1], KeyLimits(), "the line")
    assert Keyring([known], b"").find(said[0].encode()) == known
    assert (known.name, known.limits) == ("agents", KeyLimits(3))
    assert said[0] not in said[1]
    path = tmp_path / "keys"
    fresh = [edgemesh("api", "key", "--file", str(path), "--tokens-per-minute", "5").stdout.strip() for _ in range(2)]
    assert path.stat().st_mode & 0o777 == 0o600
    ring = Keyring(parse_keys(path.read_text(), KeyLimits(), str(path)), b"")
    assert [ring.find(each.encode()).limits for each in fresh] == [KeyLimits(tokens_per_minute=5)] * 2
    wrong = edgemesh("api", "key", "--name", "a b")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert len(wrong.stderr.strip().splitlines()) == 1


def test_keys_that_cannot_be_used_stop_a_start_before_it_begins(tmp_path):
    path = tmp_path / "keys"
    path.write_text("plain\n")
    path.chmod(0o644)
    done = edgemesh("start", "--port", "0", "--set", f"gateway.api_keys_file={path}")
    assert done.returncode == 2
    assert f"chmod 600 {path}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
