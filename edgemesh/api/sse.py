"""The chunks of a streamed answer as server-sent events.

Nearly all of a chunk is the same for every token of a choice, so it is encoded once: a token costs the JSON of its text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from edgemesh.api.errors import ApiError
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


class ChatChunks:
    """The events of one choice of a chat."""

    __slots__ = ("_end", "_start", "_text_end", "_text_start")

    def __init__(self, head: Head, index: int, *, include_usage: bool) -> None:
        self._start = b'data: %b{"index":%d,"delta":' % (head.json(), index)
        self._end = (b'],"usage":null}' if include_usage else b"]}") + b"\n\n"
        self._text_start = self._start + b'{"content":'
        self._text_end = b'},"logprobs":null,"finish_reason":null}' + self._end

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

    def last(self, ending: Ending) -> bytes:
        """The end of the choice."""
        return self._start + b'"","logprobs":null,' + ending.json() + self._end
