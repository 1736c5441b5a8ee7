"""Spawning, watching and dying, with real processes."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from edgemesh.runtime.process import ORPHANED, Continued, Exited, Stopped, changes, kill_group, spawn
from edgemesh.runtime.signals import Signals


@pytest.fixture
def program(tmp_path: Path):
    """Make a module of this text; run ``spawn`` on it with the module on the path."""
    pids = []

    def make(text: str, *arguments: str, **options) -> int:
        (tmp_path / "program.py").write_text(textwrap.dedent(text))
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        pid = spawn("program", arguments, log=tmp_path / "log", environment=environment, **options)
        pids.append(pid)
        return pid

    yield make
    for pid in pids:
        kill_group(pid)
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            continue


def until(found, timeout: float = 60.0):
    """Poll until there is something."""
    end = time.monotonic() + timeout
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


def test_exits_and_codes_are_seen(program):
    pid = program("import sys; sys.exit(int(sys.argv[1]))", "7")
    assert until(lambda: changes(pid)) == [Exited(7)]
    assert str(Exited(7)) == "exited with code 7"
    assert changes(pid) == []


def test_stops_continues_and_kills_are_seen(program, tmp_path):
    pid = program("import time; print('up', flush=True); time.sleep(3600)")
    until(lambda: "up" in (tmp_path / "log").read_text())
    os.kill(pid, signal.SIGSTOP)
    assert until(lambda: changes(pid)) == [Stopped(signal.SIGSTOP)]
    os.kill(pid, signal.SIGCONT)
    assert until(lambda: changes(pid)) == [Continued()]
    kill_group(pid)
    assert until(lambda: changes(pid)) == [Exited(-signal.SIGKILL)]
    assert str(Exited(-signal.SIGKILL)) == "was killed by SIGKILL"
    kill_group(pid)


def test_a_childs_change_wakes_a_poller(program, tmp_path):
    pid = program("import time; print('up', flush=True); time.sleep(3600)")
    until(lambda: "up" in (tmp_path / "log").read_text())
    with Signals() as signals:
        signals.clear()
        os.kill(pid, signal.SIGSTOP)
        assert select.select([signals.fd], [], [], 60)[0]
        assert changes(pid) == [Stopped(signal.SIGSTOP)]
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stops == 1


def test_a_child_ignores_the_terminal_and_has_no_input(program, tmp_path):
    pid = program(
        """
        import signal, sys
        ignored = [signal.getsignal(number) is signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        print(ignored, repr(sys.stdin.read()))
        """
    )
    until(lambda: changes(pid))
    assert (tmp_path / "log").read_text().strip() == "[True, True, True] ''"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_child_gets_only_the_descriptors_that_are_passed(program, tmp_path):
    passed, kept = os.pipe()
    pid = program(
        "import os, sys; print([fd for fd in map(int, sys.argv[1:]) if os.path.exists(f'/proc/self/fd/{fd}')])",
        str(passed),
        str(kept),
        inherit=(passed,),
    )
    until(lambda: changes(pid))
    assert (tmp_path / "log").read_text().strip() == f"[{passed}]"
    assert not os.get_inheritable(passed)
    os.close(passed)
    os.close(kept)


PARENT = """
import os, sys, time
from pathlib import Path
from edgemesh.runtime.process import spawn
pid = spawn("program", [], log=Path(sys.argv[1]))
print(pid, flush=True)
time.sleep(3600)
"""


def test_a_child_dies_with_its_parent(tmp_path):
    (tmp_path / "program.py").write_text("import time; print('up', flush=True); time.sleep(3600)")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    log = tmp_path / "log"
    command = [sys.executable, "-c", PARENT, str(log)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            pid = int(parent.stdout.readline())
            until(lambda: log.exists() and "up" in log.read_text())
        finally:
            parent.kill()

    def gone():
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until(gone)


def test_a_child_whose_parent_is_gone_already_ends():
    # No process has this number, so it is nobody's parent; 1 may be these tests themselves, in a container.
    command = [sys.executable, "-m", "edgemesh.runtime.child", "0", "nothing"]
    assert subprocess.run(command, check=False).returncode == ORPHANED
