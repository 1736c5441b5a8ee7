"""Real processes: a supervisor over fake actors, ended in every way."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

HERE = Path(__file__).parent
PATIENCE_S = 120.0
"""How long to wait for what must come, however busy the machine is."""

# Who gets no turn on a busy machine is silent without being dead.
SMALL = ("mesh.split=false", "supervisor.report_ms=50", f"supervisor.silence_s={PATIENCE_S / 2}")
COUPLED = ("mesh.tp=2", "mesh.dp=2", *SMALL)


class Run:
    """One supervisor's process, and what may be left of it."""

    def __init__(self, scratch: Path, overrides: tuple[str, ...], fakes: dict[str, str]) -> None:
        self.trace = scratch / "trace"
        self.tmp = scratch / "t"
        self.tmp.mkdir()
        environment = os.environ | {
            "PYTHONPATH": str(HERE),
            "FAKE": json.dumps(fakes),
            "XDG_RUNTIME_DIR": "",
            "TMPDIR": str(self.tmp),
        }
        command = [sys.executable, "-m", "fakes.start", str(self.trace), *overrides]
        self.output = scratch / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def text(self) -> str:
        return self.output.read_text()

    def until(self, words: str, timeout: float = PATIENCE_S) -> str:
        """Wait until the output has the words."""
        end = time.monotonic() + timeout
        while words not in self.text():
            assert time.monotonic() < end, f"no {words!r} in: {self.text()}"
            assert self.process.poll() is None or words in self.text(), self.text()
            time.sleep(0.01)
        return self.text()

    def run_dirs(self) -> list[Path]:
        return [path for path in self.tmp.iterdir() if path.name.startswith("em-")]

    def processes(self) -> list[psutil.Process]:
        """Every process that was started for this run, by whomever."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("TMPDIR") == str(self.tmp)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def child(self, name: str) -> psutil.Process:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if name in process.cmdline():
                    return process
        raise AssertionError(name)

    def ends(self) -> int:
        return self.process.wait(PATIENCE_S)

    def leaves_nothing(self, timeout: float = PATIENCE_S) -> None:
        end = time.monotonic() + timeout
        while self.processes() or self.run_dirs():
            assert time.monotonic() < end, (self.processes(), self.run_dirs(), self.text())
            time.sleep(0.02)

    def events(self, name: str) -> list[dict[str, object]]:
        """The supervisor's trace events of one name."""
        # What follows the last end of a line is being written now.
        lines = (self.trace / "supervisor-0.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
        return [event for line in lines if (event := msgspec.json.decode(line))["event"] == name]

    def health(self, gateway: str = "gateway-0") -> list[list[object]]:
        whole = (self.trace / f"{gateway}.health").read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


@pytest.fixture
def started(tmp_path_factory) -> Iterator[object]:
    runs: list[Run] = []

    def start(*overrides: str, **fakes: str) -> Run:
        names = {name.replace("__", ".").replace("_", "-"): how for name, how in fakes.items()}
        # Socket paths are bounded: the scratch directory's name must be short.
        run = Run(
            Path(subprocess.check_output(["mktemp", "-d", "/tmp/emt.XXXXXX"], text=True).strip()), overrides, names
        )
        runs.append(run)
        return run

    yield start
    for run in runs:
        for process in run.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        run.process.wait()
        subprocess.run(["rm", "-rf", str(run.tmp.parent)], check=True)


def test_a_mesh_starts_serves_drains_and_leaves_nothing(started):
    run = started(*COUPLED)
    run.until("serving at http://127.0.0.1:")
    assert [path.stat().st_mode & 0o777 for path in run.run_dirs()] == [0o700]
    run.process.send_signal(signal.SIGTERM)
    assert run.ends() == 0
    run.leaves_nothing()
    assert run.health() == [[True, False, ""], [False, True, "the server is shutting down"]]
    assert run.events("mesh.serving")[0]["url"] in run.text()
    assert len(run.events("actor.ready")) == len(run.events("actor.exited")) == 8
    assert {event["reason"] for event in run.events("actor.exited")} == {"exited with code 0"}


def test_the_time_that_a_pull_took_before_is_not_the_actors(started, monkeypatch):
    monkeypatch.setenv("PULLED_FOR_S", "3600")
    run = started(*SMALL, "supervisor.start_deadline_s=600")
    text = run.until(" after 36")
    assert re.search(r"serving at http://127\.0\.0\.1:\d+ after 36\d\d\.\d s", text)


def test_kill_9_of_the_supervisor_leaves_nothing(started):
    run = started(*COUPLED, rank_0__mixed="child", group_0="never_ready")
    run.until("ranks: 2 of 2 ready")
    assert run.child("600").name() == "sleep"
    run.process.kill()
    run.ends()
    run.leaves_nothing()


def test_kill_9_of_the_supervisor_with_a_stopped_child_leaves_nothing(started):
    run = started(*SMALL, group_0="never_ready")
    run.until("group: 0 of 1 ready (mixed tick 7")
    run.child("gateway-0").suspend()
    run.process.kill()
    run.leaves_nothing()


@pytest.mark.parametrize("moment", range(5))
def test_a_term_at_any_moment_of_the_start_leaves_nothing(started, moment):
    run = started(*SMALL)
    deadline = time.monotonic() + 0.2 * moment
    while time.monotonic() < deadline and run.process.poll() is None:
        time.sleep(0.005)
    run.process.terminate()
    # Before Python has come to the supervisor, the signal's default ends it, and there is nothing to clean up.
    assert run.ends() in {0, -signal.SIGTERM}
    run.leaves_nothing()


def named_at_once(run: Run, event: str, name: str, began: int) -> None:
    """The mesh failed as soon as the supervisor heard of it, which a busy machine may delay."""
    (seen,) = [each for each in run.events(event) if each["name"] == name]
    (failed,) = run.events("mesh.failed")
    assert 0 <= failed["mono"] - seen["mono"] < 5e9
    assert failed["mono"] - began < PATIENCE_S / 2 * 1e9
    assert not run.events("actor.silent"), "it was seen, not missed"


def test_a_killed_rank_is_named_within_a_second_and_clients_hear_why(started):
    run = started(*COUPLED)
    run.until("serving at")
    run.until("the first tick has run")
    rank = run.child("rank-1.mixed")
    began = time.monotonic_ns()
    rank.kill()
    text = run.until("was killed by SIGKILL")
    assert "rank-1.mixed (rank 1 of group 1, mixed plane) was killed by SIGKILL" in text
    assert run.ends() == 1
    named_at_once(run, "actor.exited", "rank-1.mixed", began)
    serving, _, reason = run.health()[-1]
    assert serving is False
    assert "rank-1.mixed" in str(reason)
    run.leaves_nothing()


def test_a_stopped_rank_is_named_within_a_second(started):
    run = started(*SMALL)
    run.until("serving at")
    run.until("the first tick has run")
    rank = run.child("rank-0.mixed")
    began = time.monotonic_ns()
    rank.suspend()
    text = run.until("stopped by SIGSTOP")
    assert "rank-0.mixed (rank 0 of group 0, mixed plane) was stopped by SIGSTOP" in text
    assert run.ends() == 1
    named_at_once(run, "actor.stopped", "rank-0.mixed", began)
    run.leaves_nothing()


def test_a_hung_step_is_named_with_rank_group_plane_tick_and_phase(started):
    run = started(*SMALL, rank_0__mixed="hang")
    text = run.until("hung:")
    assert re.search(
        r"hung: mixed tick 7 is running for \d+\.\d s at rank-0\.mixed \(rank 0 of group 0, mixed plane\)", text
    )
    assert run.ends() == 1
    assert run.events("actor.hung")[0]["name"] == "rank-0.mixed"
    assert "hung" in str(run.health()[-1][2])


@pytest.mark.parametrize("name", ["router-0", "group-1", "barrier-0", "vault-0", "rank-1.mixed"])
def test_an_actor_whose_loop_hangs_is_named_though_it_reports(started, name):
    run = started(*COUPLED, **{name: "stuck"})
    text = run.until("hung:")
    assert re.search(rf"hung: its loop is busy for \d+\.\d s at {name}\b.*, over its bound of 2\.0 s", text)
    assert run.ends() == 1
    assert [event["name"] for event in run.events("actor.hung")] == [name]
    assert "hung" in str(run.health()[-1][2])
    run.leaves_nothing()


def test_silence_counts_after_its_bound(started):
    run = started(*SMALL, "supervisor.silence_s=4", router_0="mute")
    silent = re.search(r"router-0 has not reported for (\d+\.\d) s", run.until("has not reported"))
    assert silent is not None, run.text()
    assert float(silent[1]) >= 4
    assert run.ends() == 1


def test_an_actor_that_exits_is_named_with_its_code(started):
    run = started(*SMALL, router_0="exit")
    assert "router-0 exited with code 3 at" in run.until("exited with code 3")
    assert run.ends() == 1
    run.leaves_nothing()


def test_an_exception_is_named_in_its_own_words(started):
    run = started(*SMALL, group_0="crash")
    text = run.until("cannot go on")
    assert "group-0 cannot go on: RuntimeError: the fake was told to crash" in text
    assert "Traceback" not in text
    assert "Traceback" in (run.trace / "group-0.log").read_text()
    assert run.ends() == 1
    run.leaves_nothing()


def test_a_late_start_names_an_actor_and_its_step(started):
    run = started(*SMALL, "supervisor.start_deadline_s=5", group_0="never_ready")
    text = run.until("not ready after 5 s")
    # The group, unless this machine is so slow that even the processes before it are late.
    assert re.search(
        r"not ready after 5 s: [a-z]+-0\S*( \(.*\))?, (mixed tick 7, connecting for|.* hello|waiting for)", text
    )
    assert "supervisor.start_deadline_s" in text
    assert run.ends() == 1
    run.leaves_nothing()


def test_a_drain_waits_for_who_is_not_done_and_a_second_term_does_not(started):
    run = started(*SMALL, f"supervisor.drain_s={5 * PATIENCE_S}", group_0="slow_drain")
    run.until("serving at")
    run.process.terminate()
    run.until("draining")
    assert run.process.poll() is None
    run.process.terminate()
    assert run.ends() == 0
    run.leaves_nothing()


def test_a_drain_ends_at_its_deadline(started):
    run = started(*SMALL, "supervisor.drain_s=1", group_0="slow_drain")
    run.until("serving at")
    began = time.monotonic()
    run.process.terminate()
    assert run.ends() == 0
    assert time.monotonic() - began > 0.5
    assert run.events("actor.exited")[-1]["reason"] == "exited with code 0"


def test_the_port_is_taken(started):
    run = started(*SMALL)
    url = re.search(r"http://127\.0\.0\.1:(\d+)", run.until("serving at"))
    assert url is not None
    second = started(*SMALL, f"gateway.port={url[1]}")
    assert second.ends() == 1
    assert "Address already in use" in second.text()
    second.leaves_nothing()
    run.process.terminate()
    assert run.ends() == 0


def test_ten_starts_at_once(started):
    runs = [started(*SMALL) for _ in range(10)]
    for run in runs:
        run.until("serving at", 3 * PATIENCE_S)
    urls = {re.search(r"http://\S+", run.text())[0] for run in runs}
    assert len(urls) == 10
    for run in runs:
        run.process.terminate()
    for run in runs:
        assert run.ends() == 0
        run.leaves_nothing()


def test_the_supervisor_imports_no_torch_and_is_small(started):
    run = started(*SMALL)
    run.until("serving at")
    libraries = {Path(each.path).name for each in psutil.Process(run.process.pid).memory_maps()}
    assert not any("torch" in name for name in libraries)
    assert psutil.Process(run.process.pid).memory_info().rss < 80e6
