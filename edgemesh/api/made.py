"""Answers whose events and whole bodies are made by the same steps: responses and messages have one choice each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from edgemesh.api.errors import ApiError
from edgemesh.api.events import Content, Event
from edgemesh.api.forms import Part
from edgemesh.api.replies import ChatLogprobs, CompletionLogprobs, Usage
from edgemesh.api.sse import Chunks, Ending, Events, Head
from edgemesh.wire.messages import Logprob


class Maker(Protocol):
    """Makes the events of one answer, and at its end ``whole``, the body of the whole answer."""

    @property
    def whole(self) -> msgspec.Struct:
        """The body of the whole answer, once it has ended."""

    def begin(self, usage: Usage) -> bytes:
        """What comes before anything is said."""

    def say(self, events: Iterable[Event]) -> bytes:
        """What the model says next."""

    def last(self, ending: Ending) -> bytes:
        """The model has said everything."""

    def end(self, usage: Usage) -> bytes:
        """The end of the answer."""

    def fail(self, error: ApiError) -> bytes:
        """What ends an answer that can no longer be an error's status."""


class MadeForm:
    """The form of an endpoint whose answers a maker makes; ``make`` takes what they begin with."""

    def __init__(self, make: Callable[[Head], Maker]) -> None:
        self._make = make

    def head(self, name: str, created: int, model: str) -> Head:
        """What the answer begins with."""
        return Head(name, "", created, model)

    def events(self, head: Head, *, include_usage: bool) -> Events:
        """The events of a streamed answer, which always tell the usage."""
        del include_usage
        return _Made(self._make(head))

    def opening(self, prompt: int) -> str:
        """Nothing is echoed."""
        del prompt
        return ""

    def logprobs(self, entries: Sequence[Logprob], offset: int) -> ChatLogprobs | CompletionLogprobs:
        """None, for nobody can ask for them."""
        del entries, offset
        return ChatLogprobs(content=[])

    def reply(self, head: Head, parts: Sequence[Part], usage: Usage) -> bytes:
        """The whole answer."""
        [part] = parts
        maker = self._make(head)
        maker.say(part.told)
        maker.last(part.ending)
        maker.end(usage)
        return msgspec.json.encode(maker.whole)


class _Made:
    """A maker's events, the events of its only choice among them."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self.begin = maker.begin
        self.end = maker.end
        self.fail = maker.fail
        self.last = maker.last

    def chunks(self, index: int) -> Chunks:
        """The events of the only choice."""
        del index
        return self

    def first(self) -> bytes:
        """Nothing: an item begins with its first text."""
        return b""

    def text(self, text: str, logprobs: ChatLogprobs | CompletionLogprobs | None = None) -> bytes:
        """More text."""
        return self.tell([Content(text)] if text else [], logprobs)

    def tell(self, events: Sequence[Event], logprobs: ChatLogprobs | CompletionLogprobs | None = None) -> bytes:
        """More of the message."""
        del logprobs
        return self._maker.say(events)
