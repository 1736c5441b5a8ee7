"""A choice's text to the events of a message: reasoning, content, calls of tools.

``MessageParser`` takes the text in pieces and gives events; the events' texts put together are the same however the
text was cut (``events.gather`` makes the whole message of them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, assert_never

import msgspec

from edgemesh.api import reasoning, tools
from edgemesh.api.events import Event, Sink
from edgemesh.api.reasoning import think
from edgemesh.api.source import Reading, Source
from edgemesh.api.tool_texts import Texts
from edgemesh.api.tool_types import ToolForm
from edgemesh.api.tools import hermes, llama
from edgemesh.api.tools_coder import coder

_PIECE: Final = 4096
"""Characters that are read at once: the source copies what is left of a piece now and then."""


MARKS: Final = (reasoning.OPEN, reasoning.CLOSE, tools.OPEN, tools.CLOSE, tools.PYTHON_TAG)
"""The tags that parsers look for."""


class Parsing(msgspec.Struct, frozen=True):
    """What is looked for in one request's texts.

    ``tools`` are the names that may be called (none: calls are content), in the form ``form``; ``most`` is how many
    calls may come, 0 for any number. ``thinks``: the message may begin with reasoning; ``opened``: the prompt already
    opened it. With ``thoughts`` false the reasoning is not told. After ``budget`` tokens of it (0: any number) the tokens
    ``closing`` end it. ``texts`` are the arguments that are texts, where calls do not say so.
    """

    form: ToolForm = "hermes"
    tools: frozenset[str] = frozenset()
    most: int = 0
    thinks: bool = False
    opened: bool = False
    thoughts: bool = True
    budget: int = 0
    closing: tuple[int, ...] = ()
    texts: Texts = Texts()


class MessageParser:
    """The parser of one choice; ``call_id`` gives each call its id."""

    __slots__ = ("_ended", "_parsing", "_reading", "_sink", "_source", "thinking", "thought")

    def __init__(self, parsing: Parsing, call_id: Callable[[], str]) -> None:
        self._parsing = parsing
        self._source = Source()
        self._sink = Sink(call_id, hold=bool(parsing.tools), thoughts=parsing.thoughts, most=parsing.most)
        self._ended = False
        self.thinking = parsing.thinks
        """Whether what comes next may be reasoning."""

        self.thought = False
        """Whether the message began with reasoning; known once ``thinking`` is false."""

        self._reading: Reading[None] | None = self._read()
        self._advance()

    @property
    def inside(self) -> bool:
        """Whether reasoning goes on."""
        return self._sink.inside

    @property
    def called(self) -> bool:
        """Whether a tool is called."""
        return self._sink.calls > 0

    @property
    def done(self) -> bool:
        """Whether nothing may come any more, as all calls have that may."""
        return self._reading is None and not self._ended

    @property
    def exact(self) -> bool:
        """Whether it matters which token brings which text, so that tokens must be fed one by one."""
        return self.thinking or self._parsing.most > 0

    def feed(self, text: str) -> list[Event]:
        """The events that this text makes certain."""
        for at in range(0, len(text), _PIECE):
            self._source.feed(text[at : at + _PIECE])
            self._advance()
        return self._sink.take()

    def finish(self) -> list[Event]:
        """The events that were held back, now that no more text comes."""
        if not self._ended:
            done = self.done
            self._ended = True
            if not done:
                self._source.end()
                self._advance()
                self._sink.finish()
        return self._sink.take()

    def _advance(self) -> None:
        if self._reading is not None and next(self._reading, self) is self:
            self._reading = None

    def _read(self) -> Reading[None]:
        parsing, source, sink = self._parsing, self._source, self._sink
        if parsing.thinks:
            self.thought = yield from think(source, sink, opened=parsing.opened)
            self.thinking = False
        if parsing.tools:
            yield from self._calls(parsing)
            return
        while text := (yield from source.some()):
            sink.say(text)
            source.skip(len(text))

    def _calls(self, parsing: Parsing) -> Reading[None]:
        match parsing.form:
            case "hermes":
                return hermes(self._source, self._sink, parsing.tools)
            case "llama":
                return llama(self._source, self._sink, parsing.tools)
            case "qwen3_coder":
                return coder(self._source, self._sink, parsing.tools, parsing.texts)
        assert_never(parsing.form)
