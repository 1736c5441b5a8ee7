"""Failures that users of such servers met when theirs started or lost a process: ports, sockets, and every actor once."""

import os
import signal
import stat
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from e2e_clients import COMPLETIONS, Traces, body, events_of, posting, raw, text_of, together, wait_for

from edgemesh.bench.launch import free_port

SMALL = {"split": False, "engine__kind": "null", "healthy": False}
START_S = 180


@pytest.mark.parametrize("count", [3, pytest.param(10, marks=pytest.mark.full)])
def test_starts_at_once_do_not_meet(fresh, count):
    meshes = [fresh("tp1", **SMALL) for _ in range(count)]
    for launched in meshes:
        launched.wait_healthy(START_S)
    assert all(text_of(together(launched, [posting()])[0]) for launched in meshes)
    for launched in meshes:
        launched.signal(signal.SIGTERM)
    assert [launched.wait(60) for launched in meshes] == [0] * count
    assert [launched.leftovers() for launched in meshes] == [[]] * count


def test_of_starts_on_one_port_one_serves_and_the_others_name_it(fresh):
    port = free_port()
    meshes = [fresh("tp1", **SMALL, port=port) for _ in range(3)]
    wait_for(lambda: sum(each.process.poll() is not None for each in meshes) == 2, START_S, "two must end")
    (winner,) = (each for each in meshes if each.process.poll() is None)
    for loser in meshes:
        if loser is not winner:
            assert loser.process.returncode > 0
            assert f"{port}: Address already in use" in loser.log.read_text(), (
                "found before the start, or when the gateway binds"
            )
            assert loser.leftovers()[-1:] == [f"port {port}"], "which is the winner's"
            assert "Traceback" not in loser.log.read_text()
    winner.wait_healthy(START_S)
    assert text_of(together(winner, [posting()])[0])
    assert winner.stop() == 0


@pytest.mark.parametrize("served", ["null-dp4 split"], indirect=True)
def test_nobody_else_can_reach_a_link(served):
    port = served.port
    for pid in served.pids():
        process = psutil.Process(pid)
        listening = {each.laddr.port for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}
        assert listening <= {port}, process.cmdline()
        paths = {each.laddr for each in process.net_connections("unix") if each.laddr}
        assert all(isinstance(each, str) and not each.startswith(("@", "\0")) for each in paths), paths
        assert all(Path(each).is_relative_to(served.runtime) for each in paths if each.startswith("/")), paths
    (run,) = served.runtime.iterdir()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    sockets = [path for path in served.runtime.rglob("*") if path.is_socket()]
    assert len(sockets) > 10
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in sockets} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in served.traces.iterdir()} == {0o600}


def test_a_drain_reaches_every_group_and_cuts_no_stream(fresh):
    launched = fresh("null-dp4", split=True)
    answers, done = [], threading.Event()

    async def one(client, group):
        response = await client.post(COMPLETIONS, json=body(text=f"{group}", group=group, max_tokens=600, stream=True))
        answers.append((response.status_code, response.text))

    async def wave(client, group):
        while not done.is_set():
            await one(client, group)

    thread = threading.Thread(target=together, args=(launched, [partial(wave, group=g % 4) for g in range(16)]))
    thread.start()
    wait_for(lambda: len(answers) > 16, 60, "no answers")
    done.set()
    launched.signal(signal.SIGTERM)
    wait_for(lambda: launched.health()[0] != 200, 5, "health does not say that it drains")
    thread.join(60)
    assert not thread.is_alive()
    for status, text in answers:
        assert status in {200, 503}
        if status == 200:
            assert sum(len(event["choices"]) for event in events_of(text)) > 1
        else:
            assert "shutting down" in text
    assert launched.wait(30) == 0, launched.tell("the exit code of a drained mesh is 0")
    assert launched.leftovers() == []


@pytest.mark.parametrize("split", [True, pytest.param(False, marks=pytest.mark.full)])
def test_requests_that_are_preempted_say_what_they_say_alone(fresh, split):
    launched = fresh("tp1", split=split, engine__kv_pages=9, group__reserve_tokens=0, group__prefix_cache=False)
    texts = ("The river was wide and", "My grandmother used to say", "In the year 1850, the city")
    alone = [text_of(together(launched, [posting(text=text, max_tokens=48)])[0]) for text in texts]
    traces = Traces(launched)
    answers = together(launched, [posting(text=text, max_tokens=48) for text in texts], timeout=120)
    traces.settle(10)
    assert list(traces.events("request.preempted", actors="group-*")), "the pool was large enough for all"
    assert [text_of(answer) for answer in answers] == alone
    assert launched.stop() == 0
    assert launched.leftovers() == []


ACTORS = ["rank-3.prefill", "group-1", "barrier-0", "router-0", "vault-0", "gateway-0"]
ENDS = [(actor, number) for actor in ACTORS for number in (signal.SIGKILL, signal.SIGSTOP)]
QUICK = {("group-1", signal.SIGSTOP)}


@pytest.mark.parametrize(
    ("actor", "number"), [pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.full]) for each in ENDS]
)
def test_any_actor_that_ends_or_stops_is_named_and_nothing_is_left(fresh, actor, number):
    launched = fresh("null-dp4", split=True, supervisor__drain_s=3)
    held = raw(launched, max_tokens=5000, stream=True)
    assert held.recv(1 << 16).startswith(b"HTTP/1.1 200")
    began = time.monotonic()
    os.kill(launched.actors()[actor], number)
    if actor != "gateway-0":
        status, why = wait_for(
            lambda: (found := launched.health())[0] not in {0, 200} and found, 4, "health does not say that it is gone"
        )
        assert (status, actor in why) == (503, True), why
        # Its client learns of it in the stream.
        said = b""
        while more := held.recv(1 << 16):
            said += more
        assert b'"error"' in said, said[-500:]
        assert actor.encode() in said, said[-500:]
    held.close()
    assert launched.wait(30) != 0
    assert time.monotonic() - began < 15
    assert actor in launched.log.read_text()
    assert launched.leftovers() == []


SHAPES = {
    "tp3": (3, 1, 3),
    "tp8": (8, 1, 8),
    "tp3-dp3": (3, 3, 1),
    "tp4-dp4": (4, 4, 1),
    "tp6-dp2": (6, 2, 3),
    "tp8-dp4": (8, 4, 2),
    "tp8-dp8": (8, 8, 1),
    "plain-tp2-dp2": (2, 2, 2),
    "plain-tp4-dp2": (4, 2, 4),
    "plain-tp3-dp3": (3, 3, 3),
}


@pytest.mark.full
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_request_of_every_group_of_a_legal_topology(fresh, shape, split):
    tp, dp, attn_tp = SHAPES[shape]
    launched = fresh("tp1", split=split, mesh__tp=tp, mesh__dp=dp, mesh__attn_tp=attn_tp, engine__kv_pages=64)
    ask = {"text": "The capital of France is", "max_tokens": 8}
    said = [text_of(together(launched, [posting(**ask, group=group)], timeout=120)[0]) for group in range(dp)]
    assert len(set(said)) == 1, said
    assert "Paris" in said[0]
    # And all at once, in the other order.
    calls = [posting(**ask, group=group) for group in reversed(range(dp))]
    assert {text_of(answer) for answer in together(launched, calls, timeout=120)} == {said[0]}
    assert launched.stop() == 0
    assert launched.leftovers() == []
