"""Many calls at once: closed loop (a fixed number in flight) or open loop (Poisson arrivals, whatever the server does)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import msgspec
import uvloop
from msgspec import Struct

from edgemesh.bench import prompts
from edgemesh.bench.client import Connection, Target, call, get
from edgemesh.bench.statistics import Call


class Load(Struct, frozen=True):
    """How many requests, and when.

    ``rate`` 0 is the closed loop: ``concurrency`` calls are always in flight. Otherwise requests arrive at random, ``rate`` a second on
    average; ``concurrency`` then bounds those in flight, and a request that waits for its turn counts from when it was due.
    """

    requests: int
    concurrency: int
    rate: float = 0.0
    warmup: int = 0


class _Served(Struct):
    id: str


class _Models(Struct):
    data: list[_Served]


def model_of(target: Target) -> str:
    """The first model that the server lists. Raises ``ValueError`` if it does not answer with one."""
    try:
        reply = uvloop.run(get(target, "/v1/models"))
        return msgspec.json.decode(reply.body, type=_Models).data[0].id
    except (OSError, msgspec.DecodeError, IndexError) as error:
        message = f"http://{target.host}:{target.port}{target.base}/v1/models names no model: {error}"
        raise ValueError(message) from error


def drive(
    target: Target,
    shape: prompts.Shape,
    load: Load,
    progress: Callable[[Call], None],
    dataset: Sequence[prompts.Entry] = (),
) -> list[Call]:
    """Run the warm-up, then the load; ``progress`` sees each finished call. Calls come back in order of arrival."""
    total = load.warmup + load.requests
    # Bodies are made before the clock runs, so that the client's work in the load is only the wire's.
    bodies = [prompts.body(shape, index, dataset) for index in range(total)]
    path = prompts.path(shape)

    async def run() -> list[Call]:
        warm = Load(load.warmup, load.concurrency)
        await _closed(warm, target, path, bodies[: load.warmup], lambda _: None)
        loop = _open if load.rate else _closed
        return await loop(load, target, path, bodies[load.warmup :], progress)

    calls: list[Call] = uvloop.run(run())
    return calls


async def _closed(
    load: Load, target: Target, path: str, bodies: list[bytes], progress: Callable[[Call], None]
) -> list[Call]:
    calls: list[Call | None] = [None] * len(bodies)
    waiting = iter(enumerate(bodies))

    async def worker() -> None:
        connection = Connection()
        for index, body in waiting:
            calls[index] = done = await call(connection, target, path, body)
            progress(done)
        connection.close()

    await asyncio.gather(*(worker() for _ in range(min(load.concurrency, len(bodies)))))
    return [each for each in calls if each is not None]


async def _open(
    load: Load, target: Target, path: str, bodies: list[bytes], progress: Callable[[Call], None]
) -> list[Call]:
    rng = random.Random(load.requests)  # noqa: S311 - a load, not a secret
    idle: list[Connection] = []
    turns = asyncio.Semaphore(load.concurrency)

    async def one(body: bytes) -> Call:
        due = time.perf_counter_ns()
        async with turns:
            connection = idle.pop() if idle else Connection()
            done = await call(connection, target, path, body)
            idle.append(connection)
        done = msgspec.structs.replace(done, start_ns=due)
        progress(done)
        return done

    tasks: list[asyncio.Task[Call]] = []
    due_at = asyncio.get_running_loop().time()
    for body in bodies:
        tasks.append(asyncio.create_task(one(body)))
        due_at += rng.expovariate(load.rate)
        await asyncio.sleep(max(0.0, due_at - asyncio.get_running_loop().time()))
    calls = await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return calls
