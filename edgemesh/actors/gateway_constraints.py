"""The constraints of requests, tried out before anything is submitted: each source once, in a process beside the gateway.

The process is started by the first request with a constraint, and again when it has ended. The loop never waits for it.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

import anyio.to_thread
import msgspec
from anyio import CapacityLimiter

from edgemesh.api.errors import too_busy, unavailable
from edgemesh.api.grammar import constrained_by, constraint, unusable, weight
from edgemesh.api.openai import Request
from edgemesh.api.resolve import Job
from edgemesh.grammar.trials import LENGTH, Trial, Verdict, framed
from edgemesh.runtime.process import Killed, spawn

INLINE_CHARS: Final = 2048
"""Larger schemas, as compact JSON, are read in a worker thread."""

_large: Final = CapacityLimiter(1)
"""Reading them holds the interpreter's lock: one at a time leaves the loop every other turn."""

AT_ONCE: Final = 2
WAITING: Final = 64
"""Sources that may wait for their trial."""

PATIENCE_S: Final = 90.0
"""For one verdict: the process answers sooner, unless it is starting on a busy machine, or was stopped."""

KEPT: Final = 4096
"""Verdicts that are remembered."""

Start = Callable[[int], int]
"""Starts the process, which inherits this descriptor; its pid."""

Answer = asyncio.Future[Verdict | None]


def checker(tokenizer: Path, vocab: int, eos: Sequence[int], log: Path) -> Start:
    """Starts checkers for the model with this tokenizer; to be called in the process's main thread."""

    def start(descriptor: int) -> int:
        arguments = ["--socket", str(descriptor), "--tokenizer", str(tokenizer), "--vocab", str(vocab)]
        arguments += ["--name", "checker", "--eos", *map(str, eos)]
        return spawn("edgemesh.grammar.checker", arguments, log=log, inherit=(descriptor,))

    return start


async def constrained(request: Request, job: Job, *, large: bool = False) -> Job:
    """The job with what its request, which may be ``large``, says of its output's form. Raises ``ApiError``."""
    param = constrained_by(request)
    if not param:
        return job
    if not large and weight(request) <= INLINE_CHARS:
        source = constraint(request)
    else:
        source = await anyio.to_thread.run_sync(constraint, request, limiter=_large)
    return msgspec.structs.replace(job, grammar=source, grammar_of=param)


class Constraints:
    """Verdicts about sources, by their digest."""

    def __init__(self, start: Start) -> None:
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        self._trials: dict[bytes, asyncio.Task[str]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._process = _Process(start)

    async def check(self, job: Job) -> None:
        """Raise ``ApiError`` unless outputs can be made after the job's grammar: 400 that says why, 429 or 503 for now."""
        digest = blake2b(job.grammar.encode(), digest_size=16).digest()
        fault = self._kept.get(digest)
        if fault is None:
            fault = await self._tried(digest, job.grammar)
        self._kept[digest] = fault
        self._kept.move_to_end(digest)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        if fault:
            raise unusable(job.grammar_of, fault)

    def close(self) -> None:
        """End the process, and wait until it is gone."""
        self._process.close()
        self._process.killed.wait()

    async def _tried(self, digest: bytes, source: str) -> str:
        """The verdict of one trial, also for those who come with the same source meanwhile."""
        trial = self._trials.get(digest)
        if trial is None:
            if len(self._trials) >= WAITING:
                message = f"{WAITING} schemas or grammars wait to be checked already"
                raise too_busy(message, 1)
            trial = self._trials[digest] = asyncio.create_task(self._try(source))
            trial.add_done_callback(lambda _: self._trials.pop(digest, None))
        return await asyncio.shield(trial)

    async def _try(self, source: str) -> str:
        async with self._slots:
            # A process that was ended by someone else is started again; one that cannot live is given up.
            verdict = await self._process.ask(source) or await self._process.ask(source)
        if verdict is None:
            message = "the process that checks schemas and grammars has ended; its log says why"
            raise unavailable(message)
        if verdict.busy:
            raise unavailable(verdict.fault)
        return verdict.fault


class _Process:
    """The process and the questions that it has not answered."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._pid = 0
        self.killed = Killed()
        self._writer: asyncio.StreamWriter | None = None
        self._starting = asyncio.Lock()
        self._listening: asyncio.Task[None] | None = None
        self._asked: dict[int, Answer] = {}
        self._key = 0

    async def ask(self, source: str) -> Verdict | None:
        """Its verdict; None if it ended before that."""
        async with self._starting:
            writer = self._writer or await self._open()
        self._key += 1
        answer: Answer = asyncio.get_running_loop().create_future()
        self._asked[self._key] = answer
        writer.write(framed(Trial(self._key, source)))
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await answer
        except TimeoutError:
            self.close()
            return None

    def close(self) -> None:
        """Kill the process; whoever waits for it is told None."""
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        self.killed.add(self._pid)
        asked, self._asked = self._asked, {}
        for each in asked.values():
            if not each.done():
                each.set_result(None)

    async def _open(self) -> asyncio.StreamWriter:
        self.killed.reap()
        ours, theirs = socket.socketpair()
        with theirs:
            self._pid = self._start(theirs.fileno())
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._listening = asyncio.create_task(self._listen(reader, self._writer))
        return self._writer

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                verdict = msgspec.msgpack.decode(await reader.readexactly(length), type=Verdict)
                if not (answer := self._asked.pop(verdict.key)).done():
                    answer.set_result(verdict)
        except (asyncio.IncompleteReadError, ConnectionError):
            if self._writer is writer:
                self.close()
