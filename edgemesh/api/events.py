"""What a model's text says, piece by piece: content, reasoning, and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Final

import msgspec

from edgemesh.api.tool_types import FunctionCall, ToolCall

BLANKS: Final = " \t\r\n"


class Content(msgspec.Struct, frozen=True):
    """More of what is said."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """More of what is thought."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """The ``index``-th call of the message begins; everything about it but the arguments is known."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, as the model writes them."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """A call's arguments are complete, or the text ended in them."""

    index: int


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


class Message(msgspec.Struct, frozen=True):
    """All events of one choice together."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def gather(events: Iterable[Event]) -> Message:
    """The message that a stream of events tells."""
    content, reasoning = [], []
    begun: list[CallBegin] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin():
                begun.append(event)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallEnd():
                pass
    calls = tuple(
        ToolCall(id=begin.id, function=FunctionCall(name=begin.name, arguments="".join(parts)))
        for begin, parts in zip(begun, arguments, strict=True)
    )
    return Message("".join(content), "".join(reasoning), calls)


class Sink:
    """Takes what the parsers find, and makes events of it.

    Blanks beside a call or a tag belong to the form, not to the message: they are held back until it is known what
    they stand beside. With ``thoughts`` false reasoning is found, but not told; ``most`` calls may come, 0 for any number.
    """

    def __init__(self, call_id: Callable[[], str], *, hold: bool, thoughts: bool = True, most: int = 0) -> None:
        self._call_id = call_id
        self._hold = hold
        self._thoughts = thoughts
        self._most = most
        self._blanks: list[str] = []
        self._newlines: list[str] = []
        self._events: list[Event] = []
        self._open = False
        self._after_call = False
        self.calls = 0
        self.inside = False
        """Whether reasoning goes on."""

    @property
    def full(self) -> bool:
        """Whether no further call may come."""
        return 0 < self._most <= self.calls

    def take(self) -> list[Event]:
        """The events since the last time; pieces of one text are one event."""
        events: list[Event] = []
        for _, run in groupby(self._events, key=type):
            events += _joined(list(run))
        self._events = []
        return events

    def say(self, text: str) -> None:
        """More content."""
        told = text.rstrip(BLANKS) if self._hold else text
        if told:
            self._after_call = False
            self._events.append(Content("".join(self._blanks) + told))
            self._blanks = []
        if len(told) < len(text):
            self._blanks.append(text[len(told) :])

    def think(self, text: str) -> None:
        """More reasoning."""
        told = text.rstrip("\n")
        if told:
            if self._thoughts:
                self._events.append(Reasoning("".join(self._newlines) + told))
            self._newlines = []
        if len(told) < len(text):
            self._newlines.append(text[len(told) :])

    def thought(self) -> None:
        """The reasoning is over: line ends before the closing tag are not part of it."""
        self._newlines = []

    def begin(self, name: str) -> None:
        """A call begins."""
        self._blanks = []
        self._open = True
        self._events.append(CallBegin(self.calls, self._call_id(), name))
        self.calls += 1

    def argue(self, text: str) -> None:
        """More of the open call's arguments."""
        if text:
            self._events.append(CallArguments(self.calls - 1, text))

    def end(self) -> None:
        """The open call is over."""
        self._open = False
        self._after_call = True
        self._events.append(CallEnd(self.calls - 1))

    def finish(self) -> None:
        """The text is over: what was held back is told, unless it only stands behind a call."""
        if self._open:
            self.end()
        if self._newlines and self._thoughts:
            self._events.append(Reasoning("".join(self._newlines)))
        if self._blanks and not self._after_call:
            self._events.append(Content("".join(self._blanks)))
        self._newlines = []
        self._blanks = []


def _joined(events: list[Event]) -> list[Event]:
    """Events of one kind; what they tell of one text as one event."""
    first = events[0]
    if len(events) == 1 or isinstance(first, CallBegin | CallEnd):
        return events
    text = "".join(event.text for event in events if not isinstance(event, CallBegin | CallEnd))
    return [msgspec.structs.replace(first, text=text)]
