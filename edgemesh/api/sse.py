"""The chunks of a streamed answer as server-sent events.

Nearly all of a chunk is the same for every token of a choice, so it is encoded once: a token costs the JSON of its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from edgemesh.api.errors import ApiError
from edgemesh.api.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from edgemesh.api.replies import ChatLogprobs, CompletionLogprobs, Usage

DONE: Final = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class Ending(msgspec.Struct, frozen=True):
    """How a choice ended: ``reason`` is OpenAI's finish reason, ``stop`` the stop string or ``token`` that ended it, if one did."""

    reason: str
    stop: str | None = None
    token: int | None = None

    @property
    def stop_reason(self) -> str | int | None:
        """What ended it, as vLLM tells it beside the finish reason."""
        return self.token if self.stop is None else self.stop

    def json(self) -> bytes:
        """The fields of a choice's last chunk, up to its end."""
        return b'"finish_reason":%b,"stop_reason":%b}' % (_encode(self.reason), _encode(self.stop_reason))


def frame(chunk: msgspec.Struct | bytes) -> bytes:
    """One event that holds a chunk (a struct, or its JSON)."""
    return b"data: %b\n\n" % (chunk if isinstance(chunk, bytes) else _encode(chunk))


def error_frame(error: ApiError) -> bytes:
    """The event that ends a stream which can no longer answer with a status."""
    return frame(error.body)


class Chunks(Protocol):
    """Makes the events of one choice."""

    def first(self) -> bytes:
        """What comes before any text (the role in a chat; nothing in a completion)."""

    def text(self, text: str, logprobs: ChatLogprobs | CompletionLogprobs | None = None) -> bytes:
        """More text."""

    def tell(self, events: Sequence[Event], logprobs: ChatLogprobs | CompletionLogprobs | None = None) -> bytes:
        """More of the message, with the log-probabilities of its tokens."""

    def last(self, ending: Ending) -> bytes:
        """The end of the choice."""


class Events(Protocol):
    """Makes the events of one streamed answer; each call may give any number of them."""

    def begin(self, usage: Usage) -> bytes:
        """What comes before every choice; of ``usage`` only the prompt is known."""

    def chunks(self, index: int) -> Chunks:
        """The events of one choice."""

    def end(self, usage: Usage) -> bytes:
        """What comes after every choice."""

    def fail(self, error: ApiError) -> bytes:
        """What ends an answer that can no longer be an error's status."""


class Head(msgspec.Struct, frozen=True):
    """What every chunk of an answer begins with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: str | UnsetType = UNSET

    def json(self) -> bytes:
        """The beginning of a chunk's JSON, up to its choices."""
        return _encode(self)[:-1] + b',"choices":['


def usage_frame(head: Head, usage: Usage) -> bytes:
    """The chunk without choices that ends a stream with ``include_usage``."""
    return frame(head.json() + b'],"usage":' + _encode(usage) + b"}")


class ChunkEvents:
    """Chunks of every choice, as chat and completions have them; ``make`` gives those of one choice."""

    __slots__ = ("_head", "_include_usage", "_make")

    def __init__(self, head: Head, make: Callable[[int], Chunks], *, include_usage: bool) -> None:
        self._head = head
        self._make = make
        self._include_usage = include_usage

    def begin(self, usage: Usage) -> bytes:
        """Nothing: each choice begins by itself."""
        del usage
        return b""

    def chunks(self, index: int) -> Chunks:
        """The events of one choice."""
        return self._make(index)

    def end(self, usage: Usage) -> bytes:
        """The usage, where it was asked for, and the end of the stream."""
        return (usage_frame(self._head, usage) if self._include_usage else b"") + DONE

    def fail(self, error: ApiError) -> bytes:
        """The error, and the end of the stream."""
        return error_frame(error) + DONE


def _delta(event: Event) -> bytes:
    """What an event adds to a chat's message; nothing where a call ends, which only the next event shows."""
    match event:
        case Content(text):
            return b'{"content":%b}' % _encode(text)
        case Reasoning(text):
            return b'{"reasoning_content":%b}' % _encode(text)
        case CallBegin(index, name, function):
            call = b'{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}'
            return b'{"tool_calls":[%b]}' % (call % (index, _encode(name), _encode(function)))
        case CallArguments(index, text):
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, _encode(text))
        case CallEnd():
            return b""


class ChatChunks:
    """The events of one choice of a chat."""

    __slots__ = ("_delta_end", "_end", "_start", "_text_end", "_text_start")

    def __init__(self, head: Head, index: int, *, include_usage: bool) -> None:
        self._start = b'data: %b{"index":%d,"delta":' % (head.json(), index)
        self._end = (b'],"usage":null}' if include_usage else b"]}") + b"\n\n"
        self._text_start = self._start + b'{"content":'
        self._delta_end = b',"logprobs":null,"finish_reason":null}' + self._end
        self._text_end = b"}" + self._delta_end

    def first(self) -> bytes:
        """The role, before any text."""
        delta = b'{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        return self._start + delta + self._end

    def text(self, text: str, logprobs: ChatLogprobs | CompletionLogprobs | None = None) -> bytes:
        """More text, with the log-probabilities of its tokens."""
        if logprobs is None:
            return self._text_start + _encode(text) + self._text_end
        rest = b'},"logprobs":%b,"finish_reason":null}' % _encode(logprobs)
        return self._text_start + _encode(text) + rest + self._end

    def tell(self, events: Sequence[Event], logprobs: ChatLogprobs | CompletionLogprobs | None = None) -> bytes:
        """More of the message; the log-probabilities come with the first of its deltas."""
        if len(events) == 1 and isinstance(content := events[0], Content):
            return self.text(content.text, logprobs)
        deltas = [delta for event in events if (delta := _delta(event))]
        if logprobs is None:
            return b"".join(self._start + delta + self._delta_end for delta in deltas)
        first, *rest = deltas or [b"{}"]
        told = b',"logprobs":%b,"finish_reason":null}' % _encode(logprobs)
        return self._start + first + told + self._end + b"".join(self._start + each + self._delta_end for each in rest)

    def last(self, ending: Ending) -> bytes:
        """The end of the choice."""
        return self._start + b'{},"logprobs":null,' + ending.json() + self._end


class CompletionChunks:
    """The events of one choice of a completion."""

    __slots__ = ("_end", "_start", "_text_end")

    def __init__(self, head: Head, index: int, *, include_usage: bool) -> None:
        self._start = b'data: %b{"index":%d,"text":' % (head.json(), index)
        self._end = (b'],"usage":null}' if include_usage else b"]}") + b"\n\n"
        self._text_end = b',"logprobs":null,"finish_reason":null}' + self._end

    def first(self) -> bytes:
        """Nothing: a completion has no role."""
        return b""

    def text(self, text: str, logprobs: ChatLogprobs | CompletionLogprobs | None = None) -> bytes:
        """More text, with the log-probabilities of its tokens."""
        if logprobs is None:
            return self._start + _encode(text) + self._text_end
        rest = b',"logprobs":%b,"finish_reason":null}' % _encode(logprobs)
        return self._start + _encode(text) + rest + self._end

    def tell(self, events: Sequence[Event], logprobs: ChatLogprobs | CompletionLogprobs | None = None) -> bytes:
        """More text: a completion is content alone."""
        return self.text("".join(event.text for event in events if isinstance(event, Content)), logprobs)

    def last(self, ending: Ending) -> bytes:
        """The end of the choice."""
        return self._start + b'"","logprobs":null,' + ending.json() + self._end
