"""Parts of the gateway that need no mesh: its protocol's bounds, merged metrics, keys."""

import asyncio
import contextlib
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from edgemesh.actors.gateway import GatewayActor, HttpServer
from edgemesh.actors.gateway_http import Bodies, ClientGoneError
from edgemesh.actors.gateway_keys import ApiKeys, read_keys
from edgemesh.actors.gateway_metrics import Metrics, merge
from edgemesh.actors.gateway_protocol import MAX_HEAD_BYTES, BoundedProtocol
from edgemesh.api.errors import ApiError
from edgemesh.runtime.trace import ListTrace
from edgemesh.topology import Topology, derive
from edgemesh.wire.messages import Drain, Health, Stop


class HastyProtocol(BoundedProtocol):
    head_s = 0.2


async def count_body(scope, receive, send):
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"%d" % size
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(protocol):
    config = uvicorn.Config(count_body, port=0, http=protocol, lifespan="off", log_config=None, ws="none")
    server = HttpServer(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname()[:2])
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await task


def run(scenario, protocol=BoundedProtocol):
    async def all_of_it():
        async with asyncio.timeout(20), serving(protocol) as (reader, writer):
            return await scenario(reader, writer)

    return asyncio.run(all_of_it())


def test_a_head_without_end_is_refused():
    for start in (b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n"):
        repeated = b"x" * 1000 if not start.endswith(b"1\r\n") else b"X: y\r\n" * 170

        async def scenario(reader, writer, start=start, repeated=repeated):
            writer.write(start)
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 4 * MAX_HEAD_BYTES and not reader.at_eof():
                    writer.write(repeated)
                    await writer.drain()
                    sent += len(repeated)
                    await asyncio.sleep(0)
            return (await reader.read(200)) if not reader.exception() else b" 400 "

        assert b" 400 " in run(scenario)


def test_a_head_that_takes_too_long_ends_the_connection():
    async def scenario(reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n")
        start = time.monotonic()
        assert await reader.read() == b""
        return time.monotonic() - start

    assert 0.1 < run(scenario, HastyProtocol) < 5


@pytest.mark.parametrize("size", [0, 10, MAX_HEAD_BYTES * 3])
def test_bodies_and_idle_connections_are_not_bound_by_it(size):
    async def scenario(reader, writer):
        answers = []
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            answers.append(int(await reader.readexactly(len(str(size)))))
            await asyncio.sleep(0.3)
        return answers

    assert run(scenario, HastyProtocol) == [size] * 3


def test_merged_metrics_are_one_text_that_prometheus_reads(tmp_path):
    several = [Metrics(f"gateway-{index}", tmp_path / "metrics") for index in range(3)]
    for index, metrics in enumerate(several):
        metrics.generated(10 * (index + 1))
        metrics.answered("chat", 200)
        metrics.ttft(5_000_000)
        metrics.share()
    several[0].generated(5)
    families = list(text_string_to_metric_families(several[0].text().decode()))
    assert len({family.name for family in families}) == len(families)
    [generated] = [family for family in families if family.name == "edgemesh_generated_tokens"]
    found = {sample.labels["gateway"]: sample.value for sample in generated.samples if sample.name.endswith("_total")}
    assert found == {"gateway-0": 15, "gateway-1": 20, "gateway-2": 30}
    for kind in (b"HELP", b"TYPE"):
        assert several[0].text().count(b"# %b edgemesh_generated_tokens_total " % kind) == 1
    alone = several[0].text()
    assert merge([alone]) == alone


def test_a_disk_that_takes_no_metrics_stops_nobody(tmp_path, monkeypatch):
    one, other = (Metrics(f"gateway-{index}", tmp_path / "metrics") for index in range(2))
    one.generated(1)
    one.share()
    one.generated(1)
    monkeypatch.setattr("edgemesh.actors.gateway_metrics.SHARE_S", 0.0)
    monkeypatch.setattr(one, "_share_due_s", 0.0)
    with monkeypatch.context() as full:
        full.setattr("pathlib.Path.write_bytes", Mock(side_effect=OSError(28, "No space left on device")))
        one.share()
    assert b'edgemesh_generated_tokens_total{gateway="gateway-0"} 1.0' in other.text()
    one.share()
    assert b'edgemesh_generated_tokens_total{gateway="gateway-0"} 2.0' in other.text()


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ([Stop("rank-0 died")], "rank-0 died"),
        ([Drain(1), Stop("drained")], "the server is shutting down"),
        ([Health(0, serving=False, reason="rank-0 died"), Stop("rank-0 died")], "rank-0 died"),
        ([Drain(1), Health(0, serving=False, reason="rank-0 died"), Stop("rank-0 died")], "rank-0 died"),
    ],
)
def test_clients_hear_why_a_server_takes_nothing_and_not_what_ended_its_drain(told, reason):
    port = SimpleNamespace(trace=ListTrace(), send=Mock(), now=lambda: 0)
    gateway = GatewayActor(derive(Topology(), "/run/bench"), "gateway-0", 0, port, "http://x")
    gateway._take(Health(0, serving=True), None)
    for message in told:
        gateway._take(message, None)
    assert gateway.service.reason == reason
    with pytest.raises(ApiError, match=f"this server does not take requests now: {reason}"):
        gateway.service.ready()


PIECES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60), st.booleans()), max_size=40)


@settings(max_examples=100, deadline=None)
@given(pieces=PIECES)
def test_bodies_are_bounded_each_and_together_and_none_stays_held(pieces):
    """Ten clients send pieces in any order, end their bodies or hang up; each holds its body until the last is through."""

    async def scenario():
        bodies, over = Bodies(100, 250), asyncio.Event()
        inboxes = [asyncio.Queue() for _ in range(10)]
        sent, ends = [0] * 10, [None] * 10

        async def client(number):
            try:
                async with bodies.read({"headers": []}, inboxes[number].get) as body:
                    ends[number] = len(body)
                    await over.wait()
            except (ApiError, ClientGoneError) as error:
                ends[number] = error

        async with asyncio.TaskGroup() as tasks:
            for number in range(10):
                tasks.create_task(client(number))
            for number, size, more in pieces:
                sent[number] += size
                inboxes[number].put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert bodies.held <= 250
                for length in (end for end in ends if isinstance(end, int)):
                    assert length <= 100
            for inbox in inboxes:
                inbox.put_nowait({"type": "http.disconnect"})
            over.set()
        assert bodies.held == 0
        statuses = {end.status for end in ends if isinstance(end, ApiError)}
        assert statuses <= {413, 429}
        if sum(sent) <= 250:
            assert 429 not in statuses

    asyncio.run(scenario())


def test_bodies_that_are_too_much_together_are_refused_until_others_are_through():
    async def scenario():
        bodies = Bodies(100, 150)
        whole = AsyncMock(side_effect=lambda: {"type": "http.request", "body": b"x" * 90})
        scope = {"headers": [(b"content-length", b"90")]}
        async with bodies.read(scope, whole):
            with pytest.raises(ApiError) as refused:
                await bodies.read(scope, whole).__aenter__()
            assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
        async with bodies.read(scope, whole) as body:
            assert len(body) == bodies.held == 90

    asyncio.run(scenario())


KEYS = st.lists(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(keys=KEYS, other=st.binary(max_size=20))
def test_only_the_keys_pass(keys, other):
    known = ApiKeys(keys)
    for key in keys:
        assert known.check(b"Bearer " + key.encode()) == known.check(b"bearer  " + key.encode()) != ""
    if other.strip().decode("latin-1") not in keys:
        with pytest.raises(ApiError) as caught:
            known.check(b"Bearer " + other)
        assert caught.value.status == 401


def test_without_keys_everyone_passes_and_keys_that_are_none_are_an_error(tmp_path):
    assert ApiKeys().check(b"") == ""
    assert read_keys("", " ").check(b"") == ""
    with pytest.raises(ValueError, match="EDGEMESH_API_KEYS is set and holds no API key"):
        read_keys("", " , ")
    path = tmp_path / "keys"
    path.write_text("# none\n\n  # nor here\n")
    with pytest.raises(ValueError, match="holds no API key"):
        read_keys(str(path), "")
    path.write_text("  # whose it is\n\tone \ntwo\n")
    for header in (b"Bearer # whose it is", b"Bearer on", b"Bearer"):
        with pytest.raises(ApiError):
            read_keys(str(path), "").check(header)
    assert read_keys(str(path), "").check(b"Bearer one") != read_keys(str(path), "").check(b"Bearer two")
    with pytest.raises(OSError, match="missing"):
        read_keys(str(tmp_path / "missing"), "")
