"""A response as it is made, event by event.

Every event has its number, and says which item (``output_index``) it is about, and which part of it::

    created, in_progress, (item added, (part added, delta ..., text done, part done), item done) ..., completed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, assert_never

import msgspec

from edgemesh.api.errors import ApiError
from edgemesh.api.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from edgemesh.api.replies import Usage
from edgemesh.api.responses import Status
from edgemesh.api.responses_replies import (
    CalledItem,
    Failure,
    Incomplete,
    Response,
    Said,
    SaidItem,
    SaidText,
    ThoughtItem,
    ThoughtSummary,
    ThoughtText,
    usage_of,
)
from edgemesh.api.responses_stream import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    Failed,
    Incompleted,
    InProgress,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ResponseEvent,
    SaidDelta,
    SaidDone,
    SummaryAdded,
    SummaryDelta,
    SummaryDone,
    SummaryPartDone,
    ThoughtDelta,
    ThoughtDone,
)
from edgemesh.api.sse import Ending

_encode: Final = msgspec.json.Encoder().encode
_HOLE: Final = "\ufdd0"
"""Stands for the text in a delta that is encoded once; Unicode keeps it for such uses."""


class Shape(msgspec.Struct, frozen=True):
    """How one kind of item grows: by which events, and what of it they make whole.

    ``part`` makes the one part that it has in ``field``; a call has none.
    """

    prefix: str
    delta: Callable[..., ResponseEvent]
    done: Callable[..., ResponseEvent]
    field: str = ""
    part: Callable[..., SaidText | ThoughtText | ThoughtSummary] | None = None
    part_added: Callable[..., ResponseEvent] = PartAdded
    part_done: Callable[..., ResponseEvent] = PartDone


MESSAGE: Final = Shape("msg", SaidDelta, SaidDone, "content", SaidText)
THOUGHT: Final = Shape("rs", ThoughtDelta, ThoughtDone, "content", ThoughtText)
SUMMARY: Final = Shape("rs", SummaryDelta, SummaryDone, "summary", ThoughtSummary, SummaryAdded, SummaryPartDone)
CALL: Final = Shape("fc", ArgumentsDelta, ArgumentsDone)


class _Item:
    """The item that is growing."""

    __slots__ = ("delta", "item", "place", "shape", "texts")

    def __init__(self, shape: Shape, item: Said, index: int) -> None:
        self.shape = shape
        self.item = item
        self.place: dict[str, Any] = {"item_id": item.id, "output_index": index}
        self.texts: list[str] = []
        # Nearly all of a delta is the same for every token, so it is encoded once.
        whole = _framed(shape.delta(**self.place, delta=_HOLE, sequence_number=-1))
        self.delta = whole.replace(b"%", b"%%").replace(b"-1", b"%d").replace(_encode(_HOLE), b"%b")


class ResponseMaker:
    """Makes the events of one response, and at its end ``whole``, the response itself.

    ``now`` gives wall seconds. With ``summarise``, what the model thinks comes as a summary.
    """

    def __init__(self, begun: Response, now: Callable[[], int], *, summarise: bool) -> None:
        self.whole = begun
        self._now = now
        self._thought = SUMMARY if summarise else THOUGHT
        self._number = 0
        self._output: list[Said] = []
        self._growing: _Item | None = None
        self._cut = False

    def begin(self, usage: Usage) -> bytes:
        """The response before its output; it tells no usage yet."""
        del usage
        return self._event(Created, response=self.whole) + self._event(InProgress, response=self.whole)

    def say(self, events: Iterable[Event]) -> bytes:
        """What the model says next."""
        return b"".join([self._say(event) for event in events])

    def last(self, ending: Ending) -> bytes:
        """The end of the output, which holds at least an empty text."""
        self._cut = ending.reason == "length"
        out = b"" if self._output or self._growing else self._message()
        return out + self._close("incomplete" if self._cut else "completed")

    def end(self, usage: Usage) -> bytes:
        """The whole response."""
        if self._cut:
            why = Incomplete(reason="max_output_tokens")
            self._finish(status="incomplete", incomplete_details=why, usage=usage_of(usage))
            return self._event(Incompleted, response=self.whole)
        self._finish(status="completed", completed_at=self._now(), usage=usage_of(usage))
        return self._event(Completed, response=self.whole)

    def fail(self, error: ApiError) -> bytes:
        """The response as far as it came, and why it came no further."""
        out = self._close("incomplete")
        busy = error.status == 429
        why = Failure(code="rate_limit_exceeded" if busy else "server_error", message=error.detail.message)
        self._finish(status="failed", error=why)
        return out + self._event(Failed, response=self.whole)

    def _finish(self, **fields: Any) -> None:  # noqa: ANN401 - the response's own fields
        self.whole = msgspec.structs.replace(self.whole, output=tuple(self._output), **fields)

    def _say(self, event: Event) -> bytes:
        match event:
            case Content(text):
                return self._message() + self._grow(text)
            case Reasoning(text):
                return self._reasoning() + self._grow(text)
            case CallBegin():
                item = CalledItem(id=self._id(CALL), status="in_progress", call_id=event.id, name=event.name)
                return self._open(CALL, item)
            case CallArguments(text=text):
                return self._grow(text)
            case CallEnd():
                return self._close("completed")
        assert_never(event)

    def _message(self) -> bytes:
        """A message is open."""
        if self._growing is not None and self._growing.shape is MESSAGE:
            return b""
        return self._open(MESSAGE, SaidItem(id=self._id(MESSAGE), status="in_progress"))

    def _reasoning(self) -> bytes:
        """A reasoning is open."""
        if self._growing is not None and self._growing.shape is self._thought:
            return b""
        return self._open(self._thought, ThoughtItem(id=self._id(self._thought), status="in_progress"))

    def _id(self, shape: Shape) -> str:
        index = len(self._output) + (self._growing is not None)
        return f"{shape.prefix}_{self.whole.id.removeprefix('resp_')}_{index}"

    def _open(self, shape: Shape, item: Said) -> bytes:
        """Begin an item, and its part; the one before it is complete."""
        out = self._close("completed")
        index = len(self._output)
        self._growing = growing = _Item(shape, item, index)
        out += self._event(ItemAdded, output_index=index, item=item)
        if shape.part is not None:
            out += self._event(shape.part_added, **growing.place, part=shape.part(text=""))
        return out

    def _grow(self, text: str) -> bytes:
        growing = self._growing
        assert growing is not None
        growing.texts.append(text)
        return growing.delta % (self._next(), _encode(text))

    def _close(self, status: Status) -> bytes:
        """End the open item, if there is one."""
        growing, self._growing = self._growing, None
        if growing is None:
            return b""
        shape, item, place, text = growing.shape, growing.item, growing.place, "".join(growing.texts)
        if isinstance(item, CalledItem):
            item = msgspec.structs.replace(item, status=status, arguments=text)
            out = self._event(shape.done, **place, name=item.name, arguments=text)
        else:
            assert shape.part is not None
            part = shape.part(text=text)
            item = msgspec.structs.replace(item, status=status, **{shape.field: (part,)})
            out = self._event(shape.done, **place, text=text) + self._event(shape.part_done, **place, part=part)
        self._output.append(item)
        return out + self._event(ItemDone, output_index=len(self._output) - 1, item=item)

    def _event(self, make: Callable[..., ResponseEvent], **fields: Any) -> bytes:  # noqa: ANN401 - the event's own
        return _framed(make(**fields, sequence_number=self._next()))

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number


def _framed(event: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), _encode(event))
