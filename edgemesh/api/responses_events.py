"""A response as it is made, event by event.

Every event has its number, and says which item (``output_index``) it is about, and which part of it::

    created, in_progress, (item added, (part added, delta ..., text done, part done), item done) ..., completed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, assert_never

import msgspec
from msgspec import UNSET

from edgemesh.api.errors import ApiError
from edgemesh.api.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from edgemesh.api.replies import Usage
from edgemesh.api.responses import Status
from edgemesh.api.responses_input import CustomInput
from edgemesh.api.responses_replies import (
    CalledItem,
    CustomCalledItem,
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
from edgemesh.api.responses_sealed import sealed
from edgemesh.api.responses_stream import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    CustomDelta,
    CustomDone,
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
from edgemesh.api.responses_toolbox import Toolbox
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
CUSTOM: Final = Shape("ctc", CustomDelta, CustomDone)


class _Item:
    """The item that is growing."""

    __slots__ = ("delta", "input", "item", "place", "shape", "texts")

    def __init__(self, shape: Shape, item: Said, index: int) -> None:
        self.shape = shape
        self.item = item
        self.place: dict[str, Any] = {"item_id": item.id, "output_index": index}
        self.texts: list[str] = []
        self.input = CustomInput() if shape is CUSTOM else None
        """Reads the item's text out of a call's arguments, where they are more than that."""

        # Nearly all of a delta is the same for every token, so it is encoded once.
        whole = _framed(shape.delta(**self.place, delta=_HOLE, sequence_number=-1))
        self.delta = whole.replace(b"%", b"%%").replace(b"-1", b"%d").replace(_encode(_HOLE), b"%b")


class ResponseMaker:
    """Makes the events of one response, and at its end ``whole``, the response itself.

    ``now`` gives wall seconds; ``box`` holds the tools that may be called. With ``summarise``, what the model thinks comes as
    a summary; with ``seal``, also as text for the next turn.
    """

    def __init__(
        self, begun: Response, now: Callable[[], int], *, box: Toolbox, summarise: bool, seal: bool = False
    ) -> None:
        self.whole = begun
        self._now = now
        self._box = box
        self._seal = seal
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
                return self._call(event)
            case CallArguments(text=text):
                return self._argue(text)
            case CallEnd():
                return self._close("completed")
        assert_never(event)

    def _call(self, begin: CallBegin) -> bytes:
        """A call is open."""
        known = self._box.find(begin.name)
        custom = known is not None and known.custom
        shape, make = (CUSTOM, CustomCalledItem) if custom else (CALL, CalledItem)
        name, space = (begin.name, None) if known is None else (known.name, known.namespace)
        namespace = UNSET if space is None else space
        item = make(id=self._id(shape), status="in_progress", call_id=begin.id, name=name, namespace=namespace)
        return self._open(shape, item)

    def _argue(self, text: str) -> bytes:
        """More of a call's arguments."""
        growing = self._growing
        assert growing is not None
        told = text if growing.input is None else growing.input.feed(text)
        return self._grow(told) if told else b""

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
        growing = self._growing
        if growing is None:
            return b""
        late = growing.input.end() if growing.input is not None else ""
        out = self._grow(late) if late else b""
        self._growing = None
        item, told = self._closed(growing, status)
        self._output.append(item)
        return out + told + self._event(ItemDone, output_index=len(self._output) - 1, item=item)

    def _closed(self, growing: _Item, status: Status) -> tuple[Said, bytes]:
        """The whole item, and the events that say what it holds."""
        shape, item, place, text = growing.shape, growing.item, growing.place, "".join(growing.texts)
        match item:
            case CalledItem():
                told = self._event(shape.done, **place, name=item.name, arguments=text)
                return msgspec.structs.replace(item, status=status, arguments=text), told
            case CustomCalledItem():
                told = self._event(shape.done, **place, input=text)
                return msgspec.structs.replace(item, status=status, input=text), told
        assert shape.part is not None
        part = shape.part(text=text)
        fields: dict[str, Any] = {shape.field: (part,)}
        if isinstance(item, ThoughtItem) and self._seal:
            fields["encrypted_content"] = sealed(text)
        told = self._event(shape.done, **place, text=text) + self._event(shape.part_done, **place, part=part)
        return msgspec.structs.replace(item, status=status, **fields), told

    def _event(self, make: Callable[..., ResponseEvent], **fields: Any) -> bytes:  # noqa: ANN401 - the event's own
        return _framed(make(**fields, sequence_number=self._next()))

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number


def _framed(event: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), _encode(event))
