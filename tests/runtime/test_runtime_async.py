"""The gateway's end, on asyncio and on uvloop."""

import asyncio
import threading

import pytest
import uvloop

from edgemesh.runtime import zmq_async
from edgemesh.runtime.link import LinkRefused
from edgemesh.runtime.zmq_async import AsyncPort
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.messages import Accepted, Cancel, Place, Rejected, Sampling, Submit


def answer(port, count):
    """Answer every message of a gateway."""
    while count:
        for kind, message in port.receive(120_000):
            count -= 1
            if kind is LinkKind.STEER:
                port.send(LinkKind.EMIT, Accepted(0, 0, 0, message.request, 0), "gateway-0")
            else:
                port.send(LinkKind.REJECT, Rejected(message.request, 0, 0, 429, "full", ""), "gateway-0")


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request):
    return lambda main: request.param(asyncio.wait_for(main, 120))


def test_every_message_comes_though_sends_and_arrivals_interleave(run, port_of):
    threads = [
        threading.Thread(target=answer, args=(port_of(name), 1000), daemon=True) for name in ("group-0", "router-0")
    ]

    async def main(gateway):
        async with AsyncPort(gateway) as links:
            for number in range(1000):
                links.send(LinkKind.STEER, Cancel(0, f"s{number}", 0), "group-0")
                links.send(LinkKind.SUBMIT, Submit(f"q{number}", 0, 0, TokenArray(), Sampling(), 1), "router-0")
            seen = []
            async for kind, message in links:
                seen.append((kind, message.request))
                if len(seen) == 2000:
                    return seen
        raise AssertionError

    gateway = port_of("gateway-0")
    for thread in threads:
        thread.start()
    seen = run(main(gateway))
    assert [name for kind, name in seen if kind is LinkKind.EMIT] == [f"s{number}" for number in range(1000)]
    assert [name for kind, name in seen if kind is LinkKind.REJECT] == [f"q{number}" for number in range(1000)]
    for thread in threads:
        thread.join()


def test_a_round_trip_after_idle(run, port_of):
    thread = threading.Thread(target=answer, args=(port_of("router-0"), 50), daemon=True)
    thread.start()

    async def main(gateway):
        async with AsyncPort(gateway) as links:
            for number in range(50):
                links.send(LinkKind.SUBMIT, Submit(f"q{number}", 0, 0, TokenArray(), Sampling(), 1), "router-0")
                ((kind, message),) = await links.receive()
                assert (kind, message.request) == (LinkKind.REJECT, f"q{number}")

    run(main(port_of("gateway-0")))
    thread.join()


def test_a_consumer_that_is_behind_bounds_what_is_held(run, port_of, monkeypatch):
    monkeypatch.setattr(zmq_async, "WAITING", 300)
    group, gateway = port_of("group-0"), port_of("gateway-0")

    async def main():
        async with AsyncPort(gateway) as links:
            for number in range(3000):
                group.send(LinkKind.EMIT, Accepted(0, 0, 0, f"r{number}", 0), "gateway-0")
            while len(links._queue) < 300:  # noqa: ASYNC110 - a state, not an event
                await asyncio.sleep(0)
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(links._queue) < 600
            seen = []
            while len(seen) < 3000:
                seen += [message.request for _, message in await links.receive()]
            assert seen == [f"r{number}" for number in range(3000)]

    run(main())


def test_it_refuses_what_the_port_refuses(run, port_of):
    gateway = port_of("gateway-0")

    async def main():
        async with AsyncPort(gateway) as links:
            with pytest.raises(LinkRefused):
                links.send(LinkKind.PLACE, Place(0, Submit("r", 0, 0, TokenArray(), Sampling(), 1)), "group-0")

    run(main())
