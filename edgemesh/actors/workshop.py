"""A process that works grammars out, from the side of who started it: asked without waiting, killed and replaced if it fails.

It is started by the first question. One that ends or takes too long was at the first of the questions that it had not answered: that
one gets an error, the others are asked again, with all that their streams have said so far.
"""

from __future__ import annotations

import socket
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from edgemesh.grammar.notes import CPU_S, Advance, Close, Found, Note, Open, Started, Words, packed
from edgemesh.runtime.process import Killed, spawn

PATIENCE_NS: Final = 30_000_000_000
"""For one question, once the process has nothing else to do. It bounds its own time on the processor: this is for one that stands still."""

START_NS: Final = 120_000_000_000
"""For its start: large tokenizers take seconds, and many start at once."""

STARTS: Final = 3
"""How often in a row it may fail to start."""

RECEIVE_BYTES: Final = 1 << 20
FLUSH_NS: Final = 1_000_000
"""How soon to send again what its socket did not take."""

Spawn = Callable[[int], int]
"""Starts the process with one end of its socket; its pid."""


@dataclass(slots=True)
class Talk:
    """One stream: its grammar, and all its tokens of which was asked. ``known``: the process that runs now knows it."""

    source: str
    tokens: array[int] = field(default_factory=lambda: array("i"))
    known: bool = False


class Workshop:
    """At most one process; ``spawn`` starts one, ``now`` is the time."""

    def __init__(self, start: Spawn, now: Callable[[], int]) -> None:
        self._start, self.now = start, now
        self._talks: dict[int, Talk] = {}
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._socket: socket.socket | None = None
        self._pid = 0
        self._killed = Killed()
        self._words = Words()
        self._unsent: deque[memoryview] = deque()
        self._started = False
        self._failures = 0
        self._since_ns = 0
        self._broken = ""
        self._found: list[Found] = []

    def fileno(self) -> int | None:
        """What becomes readable when there is something to take; another one after each start."""
        return None if self._socket is None else self._socket.fileno()

    def ask(self, key: int, source: str, tokens: Sequence[int]) -> None:
        """What may follow ``tokens``, the newest of the stream ``key``? One question about a stream at a time."""
        talk = self._talks.setdefault(key, Talk(source))
        talk.tokens.extend(tokens)
        if self._broken:
            self._found.append(Found(key, error=self._broken))
            return
        if not self._waiting:
            self._since_ns = self.now()
        self._waiting[key] = None
        if self._socket is None and not self._spawn():
            return
        self._say(Advance(key, tuple(tokens)) if talk.known else Open(key, talk.source, tuple(talk.tokens)))
        talk.known = True

    def drop(self, key: int) -> None:
        """The stream is over; an answer that is under way will not be given."""
        talk = self._talks.pop(key, None)
        if talk is not None and talk.known and self._socket is not None:
            self._say(Close(key))

    def take(self) -> list[Found]:
        """What has been worked out since, and what failed."""
        if self._socket is not None:
            self._flush()
            self._listen(self._socket)
            if self._waiting and self._socket is not None and self.now() >= self._limit_ns():
                patience = (PATIENCE_NS if self._started else START_NS) // 1_000_000_000
                self._fail(f"it takes more than {patience} s to work out")
        found, self._found = self._found, []
        return [each for each in found if each.key in self._talks]

    def deadline(self) -> int | None:
        """When to ``take`` though nothing is readable."""
        if self._found:
            return self.now()
        if self._socket is None:
            return None
        if self._unsent:
            return self.now() + FLUSH_NS
        return self._limit_ns() if self._waiting else None

    def close(self) -> None:
        """End the process, and wait until it is gone."""
        self._kill()
        self._killed.wait()

    def _kill(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._killed.add(self._pid)

    def _limit_ns(self) -> int:
        return self._since_ns + (PATIENCE_NS if self._started else START_NS)

    def _spawn(self) -> bool:
        self._killed.reap()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._pid = self._start(theirs.fileno())
        except OSError as error:
            ours.close()
            self._refuse(f"the process that works grammars out cannot be started: {error}")
            return False
        ours.setblocking(False)  # noqa: FBT003 - the standard library takes it by position
        self._socket, self._words, self._started, self._since_ns = ours, Words(), False, self.now()
        self._unsent.clear()
        return True

    def _say(self, note: Note) -> None:
        self._unsent.append(memoryview(packed(note)))
        self._flush()

    def _flush(self) -> None:
        assert self._socket is not None
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
        except BlockingIOError:
            return
        except OSError:  # it has ended: what it said before stands to be read
            self._unsent.clear()

    def _listen(self, end: socket.socket) -> None:
        try:
            while data := end.recv(RECEIVE_BYTES):
                for word in self._words.feed(data):
                    self._hear(word)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            pass
        self._fail(
            f"working it out ended the process that did: it takes more than {CPU_S:g} s, or is too large or too deep"
        )

    def _hear(self, word: Started | Found) -> None:
        self._since_ns = self.now()
        if isinstance(word, Found):
            self._waiting.pop(word.key, None)
            self._found.append(word)
        elif word.error:
            self._give_up(word.error)
        else:
            self._started, self._failures = True, 0

    def _give_up(self, reason: str) -> None:
        """No grammar can be worked out here."""
        self._broken = reason
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self._found.extend(Found(key, error=reason) for key in self._waiting)
        self._waiting.clear()

    def _fail(self, reason: str) -> None:
        """The process is dead, or will be now: its question gets an error, the others another process."""
        self._kill()
        for talk in self._talks.values():
            talk.known = False
        if self._started and self._waiting:
            self._found.append(Found(self._waiting.popitem(last=False)[0], error=reason))
        elif not self._started and not self._broken:
            self._failures += 1
            if self._failures >= STARTS:
                self._give_up(f"the process that works grammars out failed to start {STARTS} times")
        again, self._waiting = list(self._waiting), OrderedDict()
        for key in again:
            if key in self._talks:
                self.ask(key, "", ())


def starter(tokenizer: Path, eos: Sequence[int], vocab: int, log: Path, name: str, *, cpu_s: float = CPU_S) -> Spawn:
    """Starts workers for one model; to be called from the process's main thread. ``cpu_s`` is for each question."""

    def start(descriptor: int) -> int:
        arguments = ["--socket", str(descriptor), "--tokenizer", str(tokenizer), "--vocab", str(vocab)]
        arguments += ["--eos", *map(str, eos), "--cpu-s", str(cpu_s), "--name", name]
        return spawn("edgemesh.grammar.worker", arguments, log=log, inherit=(descriptor,))

    return start
