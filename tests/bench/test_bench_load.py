"""The load generator against a server that answers as an engine would, or misbehaves in a known way."""

import asyncio
import contextlib
import json
import threading
from collections import Counter

import pytest

from edgemesh.bench import client, load, prompts
from edgemesh.bench.statistics import summarise

PATIENCE_S = 60.0


class Engine:
    """A scripted endpoint on a free port; it counts what it sees.

    ``meet``: once it has had the first number of requests, each waits until the second number of them run.
    """

    def __init__(self, tokens=5, status=200, cut_after=None, close=False, meet=(0, 0)):
        self.tokens, self.status, self.cut_after, self.close, self.meet = tokens, status, cut_after, close, meet
        self.seen, self.bodies, self.connections, self.running, self.most = Counter(), [], 0, 0, 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    async def _serve(self):
        self._loop, self._stop, self._met = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        self._ready.set()
        async with server:
            await self._stop.wait()

    async def _connection(self, reader, writer):
        self.connections += 1
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) and await self._answer(head, reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head, reader, writer):
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.bodies.append(body := await reader.readexactly(length))
        method, path, _ = head.split(b" ", 2)
        self.seen[(method + b" " + path).decode()] += 1
        if path == b"/v1/models":
            return await self._plain(writer, 200, {"data": [{"id": "served"}]})
        if self.status != 200:
            return await self._plain(writer, self.status, {"error": {"message": "no"}})
        self.running += 1
        self.most = max(self.most, self.running)
        await self._meet()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for index in range(self.tokens):
            if index == self.cut_after:
                return False
            self._chunk(writer, {"choices": [{"text": f"t{index}"}]})
            await writer.drain()
            await asyncio.sleep(0.002)
        usage = {"prompt_tokens": len(json.loads(body)["prompt"]), "completion_tokens": self.tokens}
        self._chunk(writer, {"choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        self.running -= 1
        return not self.close

    async def _meet(self):
        first, together = self.meet
        if self.seen["POST /v1/completions"] <= first:
            return
        if self.running >= together:
            self._met.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._met.wait(), PATIENCE_S)

    def _chunk(self, writer, fields):
        data = b"data: " + json.dumps(fields).encode() + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def _plain(self, writer, status, fields):
        data = json.dumps(fields).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(data))
        )
        writer.write(data)
        await writer.drain()
        return True


def run(engine, requests=12, concurrency=4, **rest):
    target = client.target(engine.url)
    shape = prompts.Shape(load.model_of(target), input_len=7)
    return load.drive(target, shape, load.Load(requests, concurrency, **rest), lambda _: None)


def test_the_closed_loop_keeps_its_number_in_flight_and_its_connections():
    with Engine(meet=(3, 4)) as engine:
        calls = run(engine, warmup=3)
    summary = summarise(calls)
    assert (summary.requests, summary.failed) == (12, 0)
    assert (summary.output_tokens, summary.prompt_tokens) == (60, 84)
    assert engine.most == 4
    assert engine.seen["POST /v1/completions"] == 15
    assert engine.connections <= 3 + 4 + 1
    assert json.loads(engine.bodies[1])["model"] == "served"
    assert all(len(call.stamps) == 5 for call in calls)
    assert all(call.start_ns < call.stamps[0] <= call.stamps[-1] <= call.end_ns for call in calls)
    # What waited for a client without a turn comes to it all at once.
    assert any(call.stamps[0] < call.stamps[-1] for call in calls)


def test_the_open_loop_does_not_wait_for_the_server():
    with Engine(meet=(0, 10)) as engine:
        calls = run(engine, requests=10, concurrency=10, rate=2000.0)
    assert (summarise(calls).requests, engine.most) == (10, 10)


def test_a_server_that_closes_after_each_answer_is_called_again():
    with Engine(close=True) as engine:
        assert summarise(run(engine)).requests == 12


@pytest.mark.parametrize(
    ("fault", "words"), [({"status": 503}, "status 503"), ({"cut_after": 2}, "closed"), ({"cut_after": 0}, "closed")]
)
def test_a_failed_call_is_counted_and_says_why(fault, words):
    with Engine(**fault) as engine:
        calls = run(engine, requests=3)
    assert summarise(calls).failed == 3
    assert all(words in call.error for call in calls)


def test_a_server_that_is_not_there_is_an_error_and_not_an_exception():
    with Engine() as engine:
        url = engine.url
    shape = prompts.Shape("m", input_len=7)
    (call,) = load.drive(client.target(url), shape, load.Load(1, 1), lambda _: None)
    assert "Connection" in call.error
    with pytest.raises(ValueError, match="names no model"):
        load.model_of(client.target(url))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="url"):
        client.target(url)
