"""Parts of the gateway that need no mesh: merged metrics, bodies, what it tells clients."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from edgemesh.actors.gateway import GatewayActor
from edgemesh.actors.gateway_http import Bodies, ClientGoneError
from edgemesh.actors.gateway_metrics import Metrics, merge
from edgemesh.api.errors import ApiError
from edgemesh.runtime.trace import ListTrace
from edgemesh.topology import Topology, derive
from edgemesh.wire.messages import Drain, Health, Stop


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
