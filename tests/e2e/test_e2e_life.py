"""How a mesh starts and ends: drained, stopped, killed, or with a rank that dies, stops or hangs; nothing is left."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time

import httpx
import pytest
from e2e_clients import COMPLETIONS, PATIENCE_S, body, held, rest_of, wait_for

from edgemesh.bench.launch import COMMAND

USAGE = {"stream_options": {"include_usage": True}}
LONG = {"model": "smollm2-135m", "prompt": "A long story:", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


class Stream:
    """One streamed request in a thread of its own: every event it got, and how it ended."""

    def __init__(self, launched, **fields):
        self.events, self.failure, self.status = [], None, 0
        self._body = LONG | {"stream": True} | fields
        self._url = f"{launched.url}/v1/completions"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE_S) as response:
                self.status = response.status_code
                if self.status != 200:
                    response.read()
                    self.events.append(response.text)
                    return
                self.events.extend(line[6:] for line in response.iter_lines() if line.startswith("data: "))
        except httpx.HTTPError as error:
            self.failure = error

    def wait_first(self):
        wait_for(lambda: self.events, "no event came")
        return self

    def join(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the stream did not end"
        return self

    @property
    def errors(self):
        return [
            json.loads(event)["error"]
            for event in self.events
            if event.startswith("{") and "error" in json.loads(event)
        ]


def events_of(launched, actor):
    path = launched.traces / f"{actor}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def drains(launched):
    wait_for(lambda: launched.health()[0] == 503, lambda: launched.tell("health does not say that it drains"))


def test_sigterm_drains(fresh):
    launched = fresh("tp1", split=False, engine__kind="null", supervisor__drain_s=600)
    with held(launched, "A long story", max_tokens=3000, **USAGE) as (running,):
        launched.signal(signal.SIGTERM)
        drains(launched)
        late = httpx.post(launched.url + COMPLETIONS, json=body(), timeout=PATIENCE_S)
        assert (late.status_code, "shutting down" in late.text) == (503, True)
        said = rest_of(running)
    assert b"data: [DONE]" in said[-64:]
    assert b'"completion_tokens":3000' in said, said[-500:]
    assert launched.wait(60) == 0, launched.tell("the exit code of a drained mesh is 0")
    assert launched.leftovers() == []


def test_a_second_sigterm_stops_now(fresh):
    launched = fresh("tp1", split=True, engine__kind="null", supervisor__drain_s=600)
    with held(launched, "A long story", max_tokens=5000) as (running,):
        launched.signal(signal.SIGTERM)
        drains(launched)
        launched.signal(signal.SIGTERM)
        # One that drained on would wait for its client.
        assert launched.wait(25) == 0, launched.tell("a mesh that was asked to stop ends with 0")
        (stopping,) = [each for each in events_of(launched, "supervisor-0") if each["event"] == "mesh.stopping"]
        assert stopping["stage"] == "draining"
        with contextlib.suppress(ConnectionError):
            assert b'"finish_reason":"length"' not in rest_of(running)
    assert launched.leftovers() == []


def test_kill_9_of_the_supervisor_leaves_nothing(fresh):
    launched = fresh("tp2-dp2", split=False)
    Stream(launched).wait_first()
    assert len(launched.pids()) > 5
    launched.signal(signal.SIGKILL)
    launched.wait(60)
    assert launched.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_ends_or_stops_is_named_within_a_second(fresh, number):
    launched = fresh("tp2-dp2", split=True, supervisor__drain_s=3)
    running = Stream(launched).wait_first()
    rank = "rank-1.decode"
    at = time.time_ns()
    os.kill(launched.actors()[rank], number)
    status, why = wait_for(
        lambda: (found := launched.health())[0] not in {0, 200} and found,
        lambda: launched.tell("health does not say that a rank is gone"),
    )
    assert status == 503, launched.tell(f"{status}: {why}")
    assert rank in why
    running.join()
    assert running.errors, f"the running request's stream has no error: {running.events[-3:]} {running.failure}"
    assert launched.wait(60) != 0
    wanted = "actor.exited" if number == signal.SIGKILL else "actor.stopped"
    events = events_of(launched, "supervisor-0")
    named = [each for each in events if each["event"] == wanted and each.get("name") == rank]
    assert named, launched.tell(f"no {wanted} of {rank}")
    (failed,) = [each for each in events if each["event"] == "mesh.failed"]
    # From when the supervisor was told; when it is scheduled is up to a machine that may be busy.
    assert 0 <= failed["mono"] - named[0]["mono"] < 1_000_000_000
    assert failed["ts"] - at < 30_000_000_000
    assert not [each for each in events if each["event"] == "actor.silent"], "it was seen, not missed"
    assert rank in launched.log.read_text()
    assert launched.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("actors", [1, 5])
def test_an_end_while_starting_leaves_nothing(fresh, number, actors):
    launched = fresh("tp2-dp2", split=False, healthy=False)
    wait_for(lambda: len(launched.actors()) >= actors, lambda: launched.tell(f"fewer than {actors} actors"))
    launched.signal(number)
    launched.wait(60)
    assert launched.leftovers() == []


def test_a_start_that_cannot_be_says_why_and_ends(tmp_path):
    command = [*COMMAND, "start", "--topology", "demo", "--set", "mesh.tp=3", "--set", "mesh.dp=2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert "mesh.tp" in result.stdout + result.stderr


def test_a_step_over_its_bound_is_named_and_the_mesh_ends(fresh):
    # A bound that no prefill step of this model can keep stands for a rank that hangs while its reports go on.
    launched = fresh(
        "tp1", split=False, supervisor__step_bound_s=0.01, supervisor__report_ms=20, prefill__chunk_tokens=512
    )
    running = Stream(launched, prompt="word " * 2000).join()
    assert running.errors or running.status >= 500, running.events[-3:]
    assert launched.wait(60) != 0
    (hung, *_) = [each for each in events_of(launched, "supervisor-0") if each["event"] == "actor.hung"]
    assert hung["name"] == "rank-0.mixed"
    assert hung["plane"] == "mixed"
    said = launched.log.read_text()
    assert "rank-0.mixed" in said
    assert "mixed tick" in said
    assert launched.leftovers() == []
