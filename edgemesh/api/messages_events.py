"""A message in Anthropic's form as it is made, event by event.

A message is blocks, which come one after the other::

message_start, ping, (block start, delta ..., block stop) ..., message_delta, message_stop
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, assert_never

import msgspec
from msgspec import UNSET

from edgemesh.api.errors import ApiError
from edgemesh.api.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from edgemesh.api.messages_replies import (
    UNSIGNED,
    AnswerMessage,
    AppliedEdits,
    SaidBlock,
    SaidBlocks,
    StopReason,
    ThoughtBlock,
    UsedBlock,
    error_body,
    usage_of,
)
from edgemesh.api.messages_stream import (
    BlockDelta,
    BlockDeltas,
    BlockStart,
    BlockStop,
    InputDelta,
    MessageDelta,
    MessageEnding,
    MessageStart,
    MessageStop,
    Ping,
    SignatureDelta,
    TextDelta,
    ThinkingDelta,
)
from edgemesh.api.replies import Usage, usage
from edgemesh.api.sse import Ending

_encode: Final = msgspec.json.Encoder().encode

_DELTAS: Final[dict[type[SaidBlocks], Callable[[str], BlockDeltas]]] = {
    SaidBlock: lambda text: TextDelta(text=text),
    ThoughtBlock: lambda text: ThinkingDelta(thinking=text),
    UsedBlock: lambda text: InputDelta(partial_json=text),
}
"""What adds to a block."""


class MessageMaker:
    """Makes the events of one message, and at its end ``whole``, the message itself.

    With ``managed`` the request had something to say about its context.
    """

    def __init__(self, name: str, model: str, *, managed: bool = False) -> None:
        self._edits = AppliedEdits() if managed else UNSET
        self.whole = AnswerMessage(id=name, model=model, usage=usage_of(usage(0, 0, 0)))
        self._content: list[SaidBlocks] = []
        self._growing: SaidBlocks | None = None
        self._texts: list[str] = []
        self._head = self._tail = b""
        self._reason: StopReason = "end_turn"
        self._stop: str | None = None

    def begin(self, usage: Usage) -> bytes:
        """The message before its content."""
        self.whole = msgspec.structs.replace(self.whole, usage=usage_of(usage))
        return _framed(MessageStart(message=self.whole)) + _framed(Ping())

    def say(self, events: Iterable[Event]) -> bytes:
        """What the model says next."""
        return b"".join([self._say(event) for event in events])

    def last(self, ending: Ending) -> bytes:
        """The end of the content."""
        out = b"" if self._content or self._growing else self._open(SaidBlock())
        out += self._close()
        self._reason = _reason(ending, self._content)
        self._stop = ending.stop if self._reason == "stop_sequence" else None
        return out

    def end(self, usage: Usage) -> bytes:
        """How the message ended, and what it cost."""
        ending = MessageEnding(stop_reason=self._reason, stop_sequence=self._stop)
        self.whole = msgspec.structs.replace(
            self.whole,
            content=tuple(self._content),
            usage=usage_of(usage),
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            context_management=self._edits,
        )
        last = MessageDelta(delta=ending, usage=self.whole.usage, context_management=self._edits)
        return _framed(last) + _framed(MessageStop())

    def fail(self, error: ApiError) -> bytes:
        """The error that ends a stream."""
        return b"event: error\ndata: %b\n\n" % error_body(error)

    def _say(self, event: Event) -> bytes:
        match event:
            case Content(text):
                return self._opened(SaidBlock) + self._grow(text)
            case Reasoning(text):
                return self._opened(ThoughtBlock) + self._grow(text)
            case CallBegin():
                return self._open(UsedBlock(id=event.id, name=event.name))
            case CallArguments(text=text):
                return self._grow(text)
            case CallEnd():
                return self._close()
        assert_never(event)

    def _opened(self, kind: type[SaidBlock | ThoughtBlock]) -> bytes:
        """A block of this kind is open."""
        return b"" if isinstance(self._growing, kind) else self._open(kind())

    def _open(self, block: SaidBlocks) -> bytes:
        out = self._close()
        index = len(self._content)
        self._growing, self._texts = block, []
        # Nearly all of a delta is the same for every token, so it is encoded once.
        empty = _framed(BlockDelta(index=index, delta=_DELTAS[type(block)]("")))
        self._head, _, self._tail = empty.rpartition(b'""')
        return out + _framed(BlockStart(index=index, content_block=block))

    def _grow(self, text: str) -> bytes:
        self._texts.append(text)
        return self._head + _encode(text) + self._tail

    def _close(self) -> bytes:
        """End the open block, if there is one."""
        growing, self._growing = self._growing, None
        if growing is None:
            return b""
        index = len(self._content)
        self._content.append(_grown(growing, "".join(self._texts)))
        signed = _framed(BlockDelta(index=index, delta=SignatureDelta())) if isinstance(growing, ThoughtBlock) else b""
        return signed + _framed(BlockStop(index=index))


def _grown(block: SaidBlocks, text: str) -> SaidBlocks:
    """A block with its whole text."""
    match block:
        case SaidBlock():
            return SaidBlock(text=text)
        case ThoughtBlock():
            return ThoughtBlock(thinking=text, signature=UNSIGNED)
        case UsedBlock():
            return msgspec.structs.replace(block, input=_arguments(text))
    assert_never(block)


def _arguments(text: str) -> dict[str, Any]:
    """A tool's arguments. The model may have written no object, or not to its end: they are empty then."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _reason(ending: Ending, content: list[SaidBlocks]) -> StopReason:
    if ending.reason == "length":
        return "max_tokens"
    if any(isinstance(block, UsedBlock) for block in content):
        return "tool_use"
    return "end_turn" if ending.stop is None else "stop_sequence"


def _framed(event: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), _encode(event))
