"""How a mesh starts and ends: drained, stopped, killed, or with a rank that dies, stops or hangs; nothing is left."""

import contextlib
import json
import os
import signal
import subprocess
import time

import httpx
import pytest
from e2e_clients import COMPLETIONS, PATIENCE_S, body, held, rest_of, wait_for

from edgemesh.bench.launch import COMMAND

USAGE = {"stream_options": {"include_usage": True}}


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
    with held(launched, "A long story", max_tokens=5000):
        assert len(launched.pids()) > 5
        launched.signal(signal.SIGKILL)
        launched.wait(60)
    assert launched.leftovers() == []


@pytest.mark.parametrize(
    ("number", "engine"), [(signal.SIGKILL, "model"), (signal.SIGSTOP, "null")], ids=["killed", "stopped"]
)
def test_a_rank_that_ends_or_stops_is_named_within_a_second(fresh, number, engine):
    launched = fresh("tp2-dp2", split=True, engine__kind=engine, supervisor__drain_s=3)
    rank = "rank-1.decode"
    with held(launched, "A long story", max_tokens=5000) as (running,):
        at = time.time_ns()
        os.kill(launched.actors()[rank], number)
        # The mesh is there for two more seconds, to say so.
        status, why = wait_for(
            lambda: (found := launched.health())[0] not in {0, 200} and found,
            lambda: launched.tell("health does not say that a rank is gone"),
        )
        assert status == 503, launched.tell(f"{status}: {why}")
        assert rank in why
        said = rest_of(running)
        assert b'"error"' in said, f"the running request's stream has no error: {said[-500:]}"
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
    asked = body(text="word " * 2000, stream=True)
    answer = httpx.post(launched.url + COMPLETIONS, json=asked, timeout=PATIENCE_S)
    assert answer.status_code >= 500 or '"error"' in answer.text, answer.text[-500:]
    assert launched.wait(60) != 0
    (hung, *_) = [each for each in events_of(launched, "supervisor-0") if each["event"] == "actor.hung"]
    assert hung["name"] == "rank-0.mixed"
    assert hung["plane"] == "mixed"
    said = launched.log.read_text()
    assert "rank-0.mixed" in said
    assert "mixed tick" in said
    assert launched.leftovers() == []
