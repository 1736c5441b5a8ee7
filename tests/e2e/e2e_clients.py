"""Clients of a mesh: many at once, some that hang up or do not read; and what its traces say since a moment."""

import asyncio
import contextlib
import json
import random
import re
import socket
import subprocess
import time

import httpx

from edgemesh.bench.launch import COMMAND

MODEL = "smollm2-135m"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OPEN, SUBMITTED = "edgemesh_open_streams", "edgemesh_prompt_tokens_total"
PATIENCE_S = 150
"""For what is true at once on a quiet machine, and must be in the end on any."""


def wait_for(condition, what, deadline_s=PATIENCE_S, poll_s=0.02):
    """The first true value of ``condition``; an assertion with what ``what`` says then, if none comes in time."""
    due = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < due, what() if callable(what) else what
        time.sleep(poll_s)
    return found


def body(path=COMPLETIONS, *, text="Hello", **fields):
    """A greedy request that does not end early."""
    asked = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return {"model": MODEL, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | asked | fields


def words(count, seed=0):
    """A prompt of about ``count`` tokens that shares no beginning with that of another seed."""
    draw = random.Random(seed)
    return " ".join(f"{draw.randrange(1000)}" for _ in range(max(1, count // 3)))


def together(served, calls, timeout=PATIENCE_S):
    """Run every ``async call(client)`` at once; their results in order."""

    async def everyone():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, timeout=timeout, limits=limits) as client:
            return await asyncio.gather(*(call(client) for call in calls))

    return asyncio.run(everyone())


def posting(path=COMPLETIONS, **fields):
    """A call for ``together``: the whole answer, or the events of a stream."""

    async def call(client):
        response = await client.post(path, json=body(path, **fields))
        assert response.status_code == 200, response.text
        return events_of(response.text) if fields.get("stream") else response.json()

    return call


def events_of(text):
    """The events of a stream, which must have ended as streams do."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert data, f"no events: {text[-500:]}"
    assert data[-1] == "[DONE]", data[-1]
    events = [json.loads(each) for each in data[:-1]]
    assert not any("error" in event for event in events), events[-1]
    return events


def text_of(answer, index=0):
    """What one choice of an answer or of a stream's events says."""
    if isinstance(answer, dict):
        (choice,) = (each for each in answer["choices"] if each["index"] == index)
        return choice["text"] if "text" in choice else choice["message"]["content"]
    choices = [choice for event in answer for choice in event["choices"] if choice["index"] == index]
    return "".join(each["text"] if "text" in each else each["delta"].get("content") or "" for each in choices)


def raw(served, path=COMPLETIONS, receive_bytes=None, asked=None, **fields):
    """A connection that has sent a request, that of ``fields`` or as ``asked``, and read nothing."""
    content = json.dumps(asked or body(path, **fields)).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket())
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(PATIENCE_S)
        connection.connect(("127.0.0.1", served.port))
        connection.sendall(head.encode() + content)
        stack.pop_all()
    return connection


@contextlib.contextmanager
def held(served, *texts, **fields):
    """A connection for each text, with a stream that has begun and goes on while nobody reads it, for half a minute."""
    with contextlib.ExitStack() as stack:
        asked = {"stream": True, "receive_bytes": 4096} | fields
        connections = [stack.enter_context(raw(served, text=text, **asked)) for text in texts]
        for connection in connections:
            assert connection.recv(12) == b"HTTP/1.1 200"
        yield connections


def rest_of(connection):
    """All that still comes on a connection, up to its end or that of its stream."""
    said = b""
    while b"data: [DONE]" not in said[-64:] and (more := connection.recv(1 << 16)):
        said += more
    return said


def trace(served, *words):
    """What `edgemesh trace` says of a mesh."""
    command = [*COMMAND, "trace", *words, "--dir", str(served.traces)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class Traces:
    """What the actors traced since this object was made.

    Traces are written a few times a second; ``settle`` waits until all of them are, and no request is left. Its own requests
    are left out.
    """

    def __init__(self, served):
        self._served = served
        self._dir = served.traces
        # What was traced before may be written after: the sizes only save reading.
        self._began = {path: path.stat().st_size for path in served.traces.glob("*.jsonl")}
        self._since = time.monotonic_ns()
        self._groups = sum(name.startswith("group-") for name in served.actors())
        self._own, self._settled = set(), None

    def events(self, *names, actors="*"):
        """The events with these names, each actor's in order."""
        return (event for event in self._events(*names, actors=actors) if not self._is_own(event))

    def groups(self):
        """Group of each placed choice, by its id."""
        return {event["request"]: event["group"] for event in self.events("request.placed", actors="router-*")}

    def settle(self):
        """Wait until nothing runs any more, every page is free again, and all that led to it is written."""
        served = self._served
        if served.metric(SUBMITTED) == self._settled:
            return
        wait_for(lambda: served.metric(OPEN) == 0, lambda: f"{served.metric(OPEN)} choices are still open")
        # A last request to each group: what it leaves in the traces comes after everything else.
        last = {answer["id"] for answer in together(served, [posting(group=n, max_tokens=1) for n in self._all()])}
        self._own |= last
        wait_for(
            lambda: self._rests(last),
            lambda: f"a group has not got all its pages back, or an actor its trace: {self._resting(last)}",
            poll_s=0.1,
        )
        self._settled = served.metric(SUBMITTED)

    def _all(self):
        return range(self._groups)

    def _events(self, *names, actors="*"):
        wanted = re.compile(f'"event":"({"|".join(map(re.escape, names))})"'.encode())
        for path in sorted(self._dir.glob(f"{actors}.jsonl")):
            with path.open("rb") as file:
                if began := self._began.get(path, 0):
                    # The size may have been seen while a line was being written.
                    file.seek(began - 1)
                    file.readline()
                for line in file:
                    if wanted.search(line) and line.endswith(b"\n"):
                        event = json.loads(line)
                        if event["mono"] >= self._since:
                            yield event

    def _is_own(self, event):
        named = event.get("requests") or [event.get("request")]
        return self._own.issuperset(named)

    def _rests(self, last):
        """Whether every group is quiet after one of the ``last`` requests, and every actor has written its part of them."""
        told = {event["request"] for event in self._events("request.finished", actors="gateway-*")}
        told &= {event["request"] for event in self._events("request.placed", actors="router-*")}
        # There may be gateways that had no part in the last requests.
        received = {event["request"] for event in self._events("request.received", actors="gateway-*")}
        ends = ("request.sent", "request.failed", "request.aborted")
        ended = {event["request"] for event in self._events(*ends, actors="gateway-*")}
        resting = self._resting(last)
        return last <= told and received <= ended and len(resting) == self._groups and all(resting.values())

    def _resting(self, last):
        resting = {}
        for event in self._events("request.finished", "request.queued", "group.quiet", actors="group-*"):
            if event["event"] == "request.finished" and event["request"] in last:
                resting[event["actor"]] = False
            elif event["actor"] in resting:
                resting[event["actor"]] = (
                    event["event"] == "group.quiet" and event["free_pages"] == event["total_pages"]
                )
        return resting
