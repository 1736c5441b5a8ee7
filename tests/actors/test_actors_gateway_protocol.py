"""The bounds of a connection, on a real server with a small application: heads, pipelines, times, and how it ends."""

import asyncio
import contextlib
import random
import socket
import time

import pytest
import uvicorn
import uvloop

from edgemesh.actors.gateway import HttpServer
from edgemesh.actors.gateway_protocol import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MAX_URL_BYTES,
    SLICE_BYTES,
    Bounds,
    protocol_of,
)

POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
STREAMED = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"


async def application(scope, receive, send):
    """Counts a body; or answers before it reads one, or bit by bit, or without end."""
    path, stated = scope["path"], True
    if path == "/early":
        body = b"no"
    elif path == "/flood":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1 << 18):  # more than anyone reads in a test
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        return
    else:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        body, stated = b"%d" % size, path != "/stream"
    headers = [(b"content-length", b"%d" % len(body))] if stated else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if not stated:
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"more ", "more_body": True})
            await asyncio.sleep(0.01)
    await send({"type": "http.response.body", "body": body})


class Server:
    """``connect()`` gives a reader and a writer."""

    def __init__(self, address, told, bounds):
        self.address, self.told, self.bounds = address, told, bounds
        self._writers = []

    async def connect(self):
        reader, writer = await asyncio.open_connection(*self.address)
        self._writers.append(writer)
        return reader, writer

    async def close(self):
        for writer in self._writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def said(self, *pieces, pause_s=0.0):
        """All that the server says to these bytes until it closes the connection."""
        reader, writer = await self.connect()
        for piece in pieces:
            with contextlib.suppress(ConnectionError):
                writer.write(piece)
                await writer.drain()
            await asyncio.sleep(pause_s)
        said = await reader.read()
        writer.close()
        return said


PATIENCE_S = 60.0


def run(scenario, keep_alive_s=PATIENCE_S, **bounds):
    """What ``scenario(server)`` returns; a bound that it is not about never comes, however long this process stands still."""

    async def everything():
        told = []
        shared = Bounds(**{"head_s": PATIENCE_S, "stall_s": PATIENCE_S, "tell": told.append} | bounds)
        config = uvicorn.Config(
            application,
            port=0,
            http=protocol_of(shared),
            lifespan="off",
            log_config=None,
            ws="none",
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=1,
        )
        server = HttpServer(config)
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        clients = Server(server.servers[0].sockets[0].getsockname()[:2], told, shared)
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                return await scenario(clients)
        finally:
            await clients.close()
            server.should_exit = True
            await task

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(everything())


async def answer(reader):
    """Head and body of one answer whose length is stated."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    return head, await reader.readexactly(int(length.split(b":")[1]))


TOO_LARGE = {
    "url": (b"GET /" + b"x" * (MAX_URL_BYTES + 1) + b" HTTP/1.1\r\n\r\n", 414),
    "one header": (b"GET / HTTP/1.1\r\nX: " + b"x" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n", 431),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431),
    "trailers": (
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n" + b"X: y\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        431,
    ),
    "chunk extension": (POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * (1 << 20), 431),
}


@pytest.mark.parametrize("step", [1000, 1 << 20])
@pytest.mark.parametrize("what", TOO_LARGE)
def test_heads_are_bounded_in_every_part_and_pace(what, step):
    data, status = TOO_LARGE[what]
    pieces = [data[at : at + step] for at in range(0, len(data), step)]
    said = run(lambda server: server.said(*pieces))
    assert said.startswith(b"HTTP/1.1 %d " % status), said[:200]
    assert b"connection: close" in said
    assert b'"error"' in said


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n"])
def test_a_head_without_end_is_refused(start):
    more = b"x" * 1000 if not start.endswith(b"1\r\n") else b"X: y\r\n" * 170
    said = run(lambda server: server.said(start, *[more] * 200))
    assert said.split(b" ")[1] in {b"414", b"431"}


def test_what_is_just_small_enough_is_served():
    url = b"GET /" + b"x" * (MAX_URL_BYTES - 1) + b" HTTP/1.1\r\n"
    headers = b"".join(b"X-%d: %s\r\n" % (n, b"y" * 400) for n in range(MAX_HEADERS - 1))
    said = run(lambda server: server.said(url + headers + b"Connection: close\r\n\r\n"))
    assert said.startswith(b"HTTP/1.1 200 "), said[:200]


MALFORMED = [
    b"\x00\x01\x02\r\n\r\n",
    b"GET\r\n\r\n",
    b"get / HTTP/1.1\r\n\r\n",
    b"BREW /pot HTCPCP/1.0\r\n\r\n",
    b"GET / HTTP/2.0\r\n\r\n",
    b"GET / HTTP/0.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "GET /\u00fc HTTP/1.1\r\n\r\n".encode(),
    b"GET / HTTP/1.1\nHost: x\n\n",
    b"GET / HTTP/1.1\r\nX : y\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: y\r\n folded\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: \x00\r\n\r\n",
    POST + b"Content-Length: x\r\n\r\n",
    POST + b"Content-Length: -5\r\n\r\nhello",
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: gzip\r\n\r\nhello",
    POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloworld\r\n",
    b"CONNECT x:1 HTTP/1.1\r\n\r\n",
]


def test_what_is_malformed_is_a_400_and_ends_only_its_connection():
    async def scenario(server):
        for data in MALFORMED:
            for step in (1, len(data)):
                pieces = [data[at : at + step] for at in range(0, len(data), step)]
                said = await server.said(*pieces)
                assert said.startswith(b"HTTP/1.1 400 "), (data, said[:200])
                assert said.count(b" Bad Request\r\n") == 1, (data, said)
        reader, writer = await server.connect()
        writer.write(GET)
        assert (await answer(reader))[1] == b"0"

    run(scenario)


def test_random_bytes_get_an_answer_or_an_end_and_break_nothing():
    draw = random.Random(11)
    whole = [GET, STREAMED, POST + b"Content-Length: 5\r\n\r\nhello", TOO_LARGE["trailers"][0], *MALFORMED]

    async def one(server):
        data = bytearray(b"".join(draw.choice(whole) for _ in range(draw.randrange(1, 4))))
        for _ in range(draw.randrange(4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        cut = draw.randrange(len(data))
        said = await server.said(bytes(data[:cut]), bytes(data[cut:]))
        assert b"HTTP/1.1 5" not in said, (bytes(data), said)

    async def scenario(server):
        await asyncio.gather(*(one(server) for _ in range(150)))

    run(scenario, keep_alive_s=0.3, head_s=0.4)


def test_what_is_malformed_after_a_good_request_waits_for_its_answer():
    said = run(lambda server: server.said(STREAMED + b"\x00nonsense\r\n\r\n"))
    first, _, second = said.partition(b"0\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert first.count(b"more ") == 3
    assert second.startswith(b"HTTP/1.1 400 "), said


def test_pipelined_requests_are_answered_in_order_up_to_a_bound():
    async def scenario(server):
        reader, writer = await server.connect()
        count = 20
        writer.write(b"".join(POST + b"Content-Length: %d\r\n\r\n%s" % (n, b"x" * n) for n in range(count)))
        assert [int((await answer(reader))[1]) for _ in range(count)] == list(range(count))
        return await server.said(STREAMED + GET * 2000)

    said = run(scenario)
    assert said.count(b"HTTP/1.1 200 ") == MAX_PIPELINED + 1
    assert said.count(b"HTTP/1.1 400 ") == 1
    assert b"pipeline_too_long" in said


SOON_S = PATIENCE_S / 2
"""A bound of seconds that was kept on a busy machine; one that was not is told by ``PATIENCE_S``."""


async def timed(server, *pieces, **kwargs):
    start = time.monotonic()
    return await server.said(*pieces, **kwargs), time.monotonic() - start


def test_a_connection_that_says_nothing_ends_in_time():
    silent, silent_s = run(timed, head_s=0.4)
    assert (silent, 0.3 < silent_s < SOON_S) == (b"", True)


def test_an_idle_connection_ends_in_time():
    idle, idle_s = run(lambda server: timed(server, GET), keep_alive_s=0.5)
    assert idle.startswith(b"HTTP/1.1 200 ")
    assert 0.4 < idle_s < SOON_S


def test_a_slow_head_ends_in_time_be_it_the_first_or_the_second():
    async def scenario(server):
        slow = timed(server, *(GET[at : at + 1] for at in range(30)), pause_s=0.1)
        # After an answer, the next head has as long as the first.
        (slow, slow_s), (second, second_s) = await asyncio.gather(slow, timed(server, GET, b"GET /"))
        assert slow.startswith(b"HTTP/1.1 408 ")
        assert b"HTTP/1.1 408 " in second.removeprefix(b"HTTP/1.1 200 ")
        assert max(slow_s, second_s) < SOON_S
        assert server.told == ["head_timeout"] * 2

    run(scenario, head_s=2)


def test_a_slow_head_behind_a_running_answer_does_not_cut_it():
    pieces = POST + b"Content-Length: 1\r\n\r\n", b"x" + b"GET /"
    said = run(lambda server: server.said(*pieces, pause_s=0.2), head_s=2)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in said


@pytest.mark.parametrize("size", [0, MAX_HEAD_BYTES * 3])
def test_bodies_are_not_bound_by_the_heads_limits(size):
    async def scenario(server):
        reader, writer = await server.connect()
        sizes = []
        for _ in range(2):
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % size)
            await asyncio.sleep(1.1 * server.bounds.head_s)  # longer than a head may take
            writer.write(b"x" * size)
            sizes.append(int((await answer(reader))[1]))
        return sizes

    assert run(scenario, head_s=1.5) == [size] * 2


@pytest.mark.parametrize("complete", [True, False])
def test_a_body_that_was_not_read_keeps_the_connection_only_if_it_comes(complete):
    async def scenario(server):
        reader, writer = await server.connect()
        writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"x" * 10)
        assert (await answer(reader))[1] == b"no"
        if complete:
            writer.write(b"x" * 99990 + GET)
            assert (await answer(reader))[1] == b"0"
        start = time.monotonic()
        assert await reader.read() == b""
        return time.monotonic() - start

    assert run(scenario, keep_alive_s=2) < SOON_S


def test_a_client_that_waits_for_100_gets_it_or_its_answer_and_an_end():
    async def scenario(server):
        reader, writer = await server.connect()
        expecting = b" HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
        writer.write(b"POST /" + expecting)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        assert (await answer(reader))[1] == b"5"
        # Nobody knows whether the body follows: the next request must not be taken for it.
        writer.write(b"POST /early" + expecting)
        assert (await answer(reader))[1] == b"no"
        assert await reader.read() == b""

    run(scenario)


def test_a_stream_in_http_1_0_has_no_chunks_and_ends_with_the_connection():
    async def scenario(server):
        plain = await server.said(b"GET /stream HTTP/1.0\r\n\r\n")
        head, _, body = plain.partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == b"more more more 0"
        stated = await server.said(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert stated.endswith(b"connection: close\r\n\r\n0")
        return await server.said(STREAMED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))

    assert b"transfer-encoding: chunked" in run(scenario)


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 5\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_wish_for_another_protocol_is_passed_over_and_its_body_read(framing, step):
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    data = POST + wish + framing + GET.replace(b"\r\n\r\n", b"\r\n" + wish + b"\r\n") + GET

    async def scenario(server):
        reader, writer = await server.connect()
        for at in range(0, len(data), step):
            writer.write(data[at : at + step])
            await asyncio.sleep(0)
        return [(await answer(reader))[1] for _ in range(3)]

    assert run(scenario) == [b"5", b"0", b"0"]


def test_a_client_that_does_not_read_is_cut_and_one_that_reads_is_not():
    async def scenario(server):
        flood = GET.replace(b"/ ", b"/flood ")
        loop = asyncio.get_running_loop()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)  # noqa: FBT003 - positional only
            await loop.sock_connect(slow, server.address)
            await loop.sock_sendall(slow, flood)
            reader, writer = await server.connect()
            writer.write(flood)
            while server.told != ["slow_reader"]:
                assert await reader.read(1 << 16)
            left = 0
            while more := await loop.sock_recv(slow, 1 << 20):
                left += len(more)
        assert 0 < left < 16 << 20  # what the kernel held of all that
        assert await reader.read(1 << 16)

    run(scenario, stall_s=3)


def test_too_many_connections_end_an_idle_one_or_are_refused():
    async def scenario(server):
        idle = await server.connect()
        idle[1].write(GET)
        await answer(idle[0])
        busy = [await server.connect() for _ in range(2)]
        for _, writer in busy:
            writer.write(POST + b"Content-Length: 5\r\n\r\n")
        fourth = await server.connect()
        assert await idle[0].read() == b""
        fourth[1].write(POST + b"Content-Length: 5\r\n\r\n")
        said = await server.said(GET)
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in said
        assert server.told == ["too_many_connections"]
        for reader, writer in (*busy, fourth):
            writer.write(b"hello")
            assert (await answer(reader))[1] == b"5"
        while len(server.bounds.connections) != 3:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)

    run(scenario, max_connections=3)


def test_a_drain_closes_what_is_idle_and_ends_every_other_connection_with_its_answer():
    async def scenario(server):
        idle, running, fresh = [await server.connect() for _ in range(3)]
        idle[1].write(GET)
        await answer(idle[0])
        running[1].write(POST + b"Content-Length: 5\r\n\r\n")
        streamed = await server.connect()
        streamed[1].write(STREAMED)
        assert await streamed[0].readuntil(b"more ")
        while not server.bounds.idle:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
        server.bounds.drain()
        assert await idle[0].read() == b""
        running[1].write(b"hello")
        assert await running[0].read(15) == b"HTTP/1.1 200 OK"
        assert (await running[0].read()).endswith(b"5")
        assert (await streamed[0].read()).endswith(b"0\r\n\r\n")
        fresh[1].write(GET)
        said = await fresh[0].read()
        assert b"connection: close" in said
        assert (await server.said(GET)).count(b"connection: close") == 1

    run(scenario)


@pytest.mark.parametrize("size", [1, 7])
def test_a_body_in_tiny_pieces_is_whole_and_leaves_others_their_turns(size):
    pieces = (1 << 18) // size
    body = b"%x\r\n%b\r\n" % (size, b"x" * size) * pieces + b"0\r\n\r\n"

    async def scenario(server):
        turns = 0

        async def neighbour():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        reader, writer = await server.connect()
        beating = asyncio.create_task(neighbour())
        writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n" + body + GET)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(6) == b"%d" % (pieces * size)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        beating.cancel()
        return turns

    assert run(scenario) > len(body) // SLICE_BYTES * 2 // 3


def test_a_client_that_goes_in_the_middle_of_many_bytes_leaves_nothing_behind():
    async def scenario(server):
        for _ in range(5):
            _, writer = await server.connect()
            writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * (1 << 17))
            await asyncio.sleep(0.001)
            writer.transport.abort()
        while server.bounds.connections:  # noqa: ASYNC110 - nothing tells of a connection that is gone
            await asyncio.sleep(0.001)
        return await server.said(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))

    assert run(scenario).startswith(b"HTTP/1.1 200")
