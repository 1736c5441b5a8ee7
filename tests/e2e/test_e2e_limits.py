"""Limits over HTTP on whole meshes: queues, time, and a drain of several gateways; what is refused says when to come again."""

import contextlib
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2e_clients import (
    COMPLETIONS,
    PATIENCE_S,
    Traces,
    body,
    held,
    posting,
    rest_of,
    text_of,
    together,
    wait_for,
    words,
)

LONG = {"max_tokens": 5500, "n": 8}
"""About 44,000 tokens: no mesh says them within the time that these give a request."""


@pytest.fixture
def small(mesh):
    """Two gateways before one group with two slots, a short queue, and little time for each request."""
    return mesh(
        "tp1",
        split=False,
        engine__kind="null",
        decode__slots=2,
        group__max_waiting=24,
        group__max_waiting_tokens=3000,
        gateway__processes=2,
        gateway__request_timeout_s=2.0,
    )


def asking(**fields):
    """A call for ``together``: status, headers and the answer, whatever they are."""

    async def call(client):
        response = await client.post(COMPLETIONS, json=body(**fields))
        return response.status_code, response.headers, response.text

    return call


def retry_times(answers):
    """How long each 429 of a full queue asks to wait; all others must have been served, or have run out of time."""
    found = []
    for status, headers, text in answers:
        assert status in {200, 429, 504}, text
        if status == 429:
            assert json.loads(text)["error"]["code"] == "queue_full", text
            found.append(int(headers["retry-after"]))
    return found


def test_a_queue_that_is_full_of_requests_says_when_to_come_again(small):
    traces = Traces(small)
    answers = together(small, [asking(text=f"{number}", **LONG) for number in range(30)])
    waits = retry_times(answers)
    # 2 slots, 24 places in the queue, and each asks for 8 of them.
    assert 20 <= len(waits) < 30, len(waits)
    assert all(1 < wait <= 30 for wait in waits), waits
    traces.settle()
    assert max(event["waiting"] for event in traces.events("request.queued", actors="group-*")) <= 24
    assert retry_times(together(small, [asking(max_tokens=4)])) == []


def test_a_queue_that_is_full_of_tokens_says_when_to_come_again(small):
    traces = Traces(small)
    answers = together(small, [asking(text=words(700, number), max_tokens=4000) for number in range(14)])
    waits = retry_times(answers)
    # Two run, and about three prompts of 900 tokens fit behind them; then again as many, where the first are quickly done.
    assert 4 <= len(waits) < 14, len(waits)
    assert all(1 <= wait <= 30 for wait in waits), waits
    traces.settle()
    assert len(list(traces.events("request.rejected", actors="router-*"))) == len(waits)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_ends_clearly_and_gives_its_pages_back(small, stream):
    traces = Traces(small)
    start = time.monotonic()
    (answer,) = together(small, [asking(text="Tell me all of it", stream=stream, **LONG)])
    assert 1.5 < time.monotonic() - start < 60
    status, _, text = answer
    assert status == (200 if stream else 504), text[-500:]
    error = json.loads(text.split("data: ")[-2] if stream else text)["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
    assert text.endswith("data: [DONE]\n\n") == stream
    traces.settle()
    # Choices that ran from the start may have had the time.
    assert 1 <= len(list(traces.events("request.aborted", actors="group-*"))) <= 8
    assert [event["status"] for event in traces.events("request.failed", actors="gateway-*")] == [504]


@pytest.fixture
def clients():
    """What is entered here is closed with the test, however that ends."""
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_drain_finishes_what_runs_and_what_waits_and_refuses_what_is_new(fresh, clients):
    launched = fresh(
        "tp1", split=False, engine__kind="null", decode__slots=2, gateway__processes=2, supervisor__drain_s=600
    )
    idle = [clients.enter_context(httpx.Client(base_url=launched.url)) for _ in range(6)]
    for client in idle:
        assert client.get("/version").status_code == 200
    calls = [posting(text=words(20, number), max_tokens=2500, stream=bool(number % 2)) for number in range(8)]
    traces = Traces(launched)
    # One of the two slots is taken until its client reads, so that none of the others can be the last.
    long = {"max_tokens": 3000, "stream_options": {"include_usage": True}}
    with held(launched, "A long story", **long) as (first,), ThreadPoolExecutor(1) as pool:
        running = pool.submit(together, launched, calls)
        wait_for(lambda: len(traces.groups()) == 9, "they are not all placed")
        launched.signal(signal.SIGTERM)
        wait_for(lambda: launched.health()[0] == 503, "health does not say that it drains")
        for _ in range(6):
            late = httpx.post(launched.url + COMPLETIONS, json=body(), timeout=PATIENCE_S)
            assert (late.status_code, late.headers["connection"]) == (503, "close")
            assert "retry-after" in late.headers
        said = rest_of(first)
        assert b'"completion_tokens":3000' in said, said[-500:]
        assert [len(text_of(answer)) > 2500 for answer in running.result()] == [True] * 8
    assert launched.wait(60) == 0, launched.tell("the exit code of a drained mesh is 0")
    for client in idle:
        with pytest.raises(httpx.TransportError):
            client.get("/version")
    assert launched.leftovers() == []


def test_at_the_deadline_of_a_drain_what_still_runs_is_told(fresh):
    launched = fresh("tp1", split=False, engine__kind="null", gateway__processes=2, supervisor__drain_s=1)
    with held(launched, "0", "1", "2", max_tokens=5500, n=8, receive_bytes=None) as streams:
        launched.signal(signal.SIGTERM)
        with ThreadPoolExecutor(len(streams)) as pool:
            answers = list(pool.map(rest_of, streams))
        for said in answers:
            assert b"the server stopped: drain deadline" in said, said[-500:]
            assert b"data: [DONE]" in said[-200:]
    assert launched.wait(60) == 0
    assert launched.leftovers() == []
