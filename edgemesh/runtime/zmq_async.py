"""The same links for an actor that lives on an asyncio loop (uvloop included): the gateway.

A ZeroMQ descriptor only says that something may have changed, once: so every wake-up, and every send over a socket
that also receives, looks again whether a message is there.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, Self

import anyio
import zmq

from edgemesh.runtime.trace import Trace
from edgemesh.runtime.zmq import Channel, Received, ZmqPort
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.messages import Message

WAITING: Final = 8192
"""Messages held for a consumer that is behind; beyond it they stay in the sockets, whose own bounds then hold."""


class AsyncPort:
    """An asynchronous ``Port`` over the sockets of ``port``; for one consumer.

    ``async with AsyncPort(port) as links: async for kind, message in links: ...``
    """

    def __init__(self, port: ZmqPort) -> None:
        self.name: str = port.name
        self.trace: Trace = port.trace
        self.now = port.now
        self._port = port
        self._queue: deque[Received] = deque()
        self._paused: set[Channel] = set()
        self._arrived = anyio.Event()
        self._receiving = {id(channel): channel for channel in port.channels if channel.inlet is not None}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        for channel in self._receiving.values():
            self._loop.add_reader(_descriptor(channel), self._look, channel)
            self._look(channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._loop is not None
        for channel in self._receiving.values():
            self._loop.remove_reader(_descriptor(channel))
        self._loop = None

    def send(self, kind: LinkKind, message: Message, to: str) -> None:
        """Check and send, without waiting; raises ``LinkRefused``, ``LinkFull`` or ``PeerAbsent``."""
        self._port.send(kind, message, to)
        channel = self._port.channel(kind, to)
        if channel.inlet is not None:
            self._look(channel)

    async def receive(self) -> list[Received]:
        """All that has come, at least one message."""
        while not self._queue:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        batch = list(self._queue)
        self._queue.clear()
        paused, self._paused = self._paused, set()
        for channel in paused:
            self._look(channel)
        return batch

    async def __aiter__(self) -> AsyncIterator[Received]:
        while True:
            for received in await self.receive():
                yield received

    def _look(self, channel: Channel) -> None:
        """Take what a channel has, a bounded batch at a time so that the loop's other work goes on."""
        if self._loop is None or not channel.readable():
            return
        if len(self._queue) >= WAITING:
            self._paused.add(channel)
            return
        batch: list[Received] = []
        if self._port.drain(channel, batch):
            self._loop.call_soon(self._look, channel)
        if batch:
            self._queue.extend(batch)
            self._arrived.set()


def _descriptor(channel: Channel) -> int:
    return int(channel.socket.getsockopt(zmq.FD))
