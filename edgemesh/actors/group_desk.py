"""What a group's scheduler asks about grammars, carried to the process that works them out, and its answers back."""

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Protocol

from edgemesh.actors.workshop import Workshop, starter
from edgemesh.decide.asks import Answer, Ask
from edgemesh.decide.request import Sequence
from edgemesh.grammar.notes import Found
from edgemesh.runtime.paths import trace_dir
from edgemesh.runtime.port import Port
from edgemesh.runtime.zmq import ZmqPort
from edgemesh.topology import Mesh
from edgemesh.wire.messages import Capacity


class Desk(Protocol):
    """Where a group leaves its questions."""

    def take(self, asks: Many[Ask], dropped: Many[Sequence]) -> None:
        """Have these worked out, and forget those requests; never waits."""
        ...

    def answers(self) -> Many[Answer]:
        """What has been worked out since the last call."""
        ...

    def deadline(self) -> int | None:
        """When to look for answers though nothing wakes the group, in monotonic nanoseconds."""
        ...


class WorkshopDesk:
    """Requests as streams of a workshop."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._keys: dict[Sequence, int] = {}
        self._sequences: dict[int, Sequence] = {}
        self._last = 0

    def take(self, asks: Many[Ask], dropped: Many[Sequence]) -> None:
        """Questions first: a request may have ended since it asked."""
        for ask in asks:
            key = self._keys.get(ask.sequence)
            if key is None:
                key = self._last = self._last + 1
                self._keys[ask.sequence], self._sequences[key] = key, ask.sequence
            self._workshop.ask(key, ask.sequence.submit.grammar, ask.tokens)
        for sequence in dropped:
            key = self._keys.pop(sequence, None)
            if key is not None:
                del self._sequences[key]
                self._workshop.drop(key)

    def answers(self) -> list[Answer]:
        """Of requests that still wait for one."""
        return [self._answer(found) for found in self._workshop.take()]

    def deadline(self) -> int | None:
        """The workshop's."""
        return self._workshop.deadline()

    def _answer(self, found: Found) -> Answer:
        return Answer(
            self._sequences[found.key],
            found.mask,
            found.ended,
            found.error,
            500 if found.drawn else 400,
            found.compile_ns,
            found.mask_ns,
        )


def open_desk(mesh: Mesh, name: str, port: Port, capacity: Capacity) -> Desk:
    """The desk of a real group, which its answers wake."""
    helper = f"grammar-{name.rpartition('-')[2]}"
    tokenizer = Path(mesh.run_dir) / "model" / "tokenizer.json"
    start = starter(tokenizer, capacity.eos_token_ids, capacity.vocab_size, trace_dir(mesh) / f"{helper}.log", helper)
    workshop = Workshop(start, port.now)
    if isinstance(port, ZmqPort):
        port.also = workshop.fileno
    return WorkshopDesk(workshop)
