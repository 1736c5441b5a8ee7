"""Failures that users of such servers met when theirs started or lost a process: ports, sockets, and every actor once."""

import contextlib
import os
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from e2e_clients import COMPLETIONS, Traces, body, events_of, held, posting, rest_of, text_of, together, wait_for

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
    assert [launched.wait(120) for launched in meshes] == [0] * count
    assert [launched.leftovers() for launched in meshes] == [[]] * count


def test_of_starts_on_one_port_one_serves_and_the_others_name_it(fresh):
    port = free_port()
    meshes = [fresh("tp1", **SMALL, port=port) for _ in range(3)]
    wait_for(lambda: sum(each.process.poll() is not None for each in meshes) == 2, "two must end", START_S)
    (winner,) = (each for each in meshes if each.process.poll() is None)
    for loser in meshes:
        if loser is not winner:
            assert loser.process.returncode > 0
            assert f"{port}: Address already in use" in loser.log.read_text(), (
                "found before the start, or when the gateway binds"
            )
            # The port is the winner's.
            wait_for(
                lambda loser=loser: set(loser.leftovers(0)) <= {f"port {port}"}, lambda loser=loser: loser.leftovers(0)
            )
            assert "Traceback" not in loser.log.read_text()
    winner.wait_healthy(START_S)
    assert text_of(together(winner, [posting()])[0])
    assert winner.stop() == 0


@pytest.mark.parametrize("served", ["null-dp4 split"], indirect=True)
def test_nobody_else_can_reach_a_link(served):
    port = served.port
    for pid in served.pids():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that tried a grammar out
            process = psutil.Process(pid)
            found = process.net_connections("inet")
            assert {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN} <= {port}, process.cmdline()
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
    launched = fresh("null-dp4", split=True, supervisor__drain_s=120)
    answers = []

    async def one(client, group):
        """Whether there may be another: this one was not told that the server shuts down, and did not find it gone."""
        status, asked = 0, body(text=f"{group}", group=group, max_tokens=600, stream=True)
        try:
            async with client.stream("POST", COMPLETIONS, json=asked) as response:
                status = response.status_code
                answers.append((status, (await response.aread()).decode()))
        except httpx.TransportError:
            assert not status, "a stream was cut"
        return status == 200

    async def wave(client, group):
        while await one(client, group):
            pass

    with ThreadPoolExecutor(1) as pool:
        waves = pool.submit(together, launched, [partial(wave, group=each % 4) for each in range(16)])
        try:
            wait_for(lambda: len(answers) > 16, "no answers")
        finally:
            launched.signal(signal.SIGTERM)
        wait_for(lambda: launched.health()[0] != 200, "health does not say that it drains")
        waves.result()
    assert launched.wait(120) == 0, launched.tell("the exit code of a drained mesh is 0")
    for status, text in answers:
        assert status in {200, 503}
        if status == 200:
            assert sum(len(event["choices"]) for event in events_of(text)) > 1
        else:
            assert "shutting down" in text
    assert launched.leftovers() == []


@pytest.mark.parametrize("split", [True, pytest.param(False, marks=pytest.mark.full)])
def test_requests_that_are_preempted_say_what_they_say_alone(fresh, split):
    # Four pages of 16 tokens, of which each of three needs two in the end, and one at first.
    launched = fresh("tp1", split=split, engine__kv_pages=5, group__reserve_tokens=0, group__prefix_cache=False)
    texts = ["The river was wide and", "My grandmother used to say", "In the year 1850, the city"]
    alone = [text_of(together(launched, [posting(text=text, max_tokens=20)])[0]) for text in texts]
    traces = Traces(launched)
    # They come in one request, so that they run at the same time.
    (answer,) = together(launched, [posting(prompt=texts, max_tokens=20)])
    traces.settle()
    assert list(traces.events("request.preempted", actors="group-*")), "the pool was large enough for all"
    assert [text_of(answer, index) for index in range(3)] == alone
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
    with held(launched, "A stream", max_tokens=5000) as (stream,):
        os.kill(launched.actors()[actor], number)
        if actor != "gateway-0":
            # The mesh is there for two more seconds, to say so.
            status, why = wait_for(
                lambda: (found := launched.health())[0] not in {0, 200} and found, "health does not say that it is gone"
            )
            assert (status, actor in why) == (503, True), why
            # Its client learns of it in the stream.
            said = rest_of(stream)
            assert b'"error"' in said, said[-500:]
            assert actor.encode() in said, said[-500:]
    assert launched.wait(60) != 0
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
    said = [text_of(together(launched, [posting(**ask, group=group)])[0]) for group in range(dp)]
    assert len(set(said)) == 1, said
    assert "Paris" in said[0]
    # And all at once, in the other order.
    calls = [posting(**ask, group=group) for group in reversed(range(dp))]
    assert {text_of(answer) for answer in together(launched, calls)} == {said[0]}
    assert launched.stop() == 0
    assert launched.leftovers() == []
