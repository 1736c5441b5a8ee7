"""Calls of tools in a model's text, as it comes.

Two forms, each an object with the name and the arguments:

- ``hermes`` (Qwen, Hermes and many others): ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
- ``llama`` (Llama 3): ``{"name": ..., "parameters": {...}}`` and nothing before it, or ``<|python_tag|>`` and such an
  object; further ones behind a semicolon or a blank

What only looks like a call (no object, another name than the request's tools have) is content, to the letter. Once a
call has begun, its arguments are told as they are written, be they valid or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Final

from edgemesh.api.events import BLANKS, Sink
from edgemesh.api.source import Reading, Source

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"

_MAX_STRING: Final = 256
"""Characters of a string beside the arguments: names are shorter."""

_ARGUMENTS: Final = ("arguments", "parameters")
_BESIDE: Final = ("type", "id")


def hermes(source: Source, sink: Sink, names: Collection[str]) -> Reading[None]:
    """Read a message to its end, or to the last call that may come."""
    while (yield from source.until(OPEN, sink.say)):
        if (yield from _Call(source, sink, names, OPEN).read()):
            if sink.full:
                return
            behind = yield from source.run(BLANKS + "}")
            if not (yield from source.match(CLOSE)):
                sink.say(_blanks_behind(behind))


def llama(source: Source, sink: Sink, names: Collection[str]) -> Reading[None]:
    """Read a message to its end, or to the last call that may come."""
    opening = ""
    while True:
        before = opening + (yield from source.run(BLANKS))
        opening = ""
        if (yield from source.peek()) != "{":
            sink.say(before)
        elif (yield from _Call(source, sink, names, before).read()):
            if sink.full:
                return
            sink.say(_blanks_behind((yield from source.run(BLANKS + "};"))))
            continue
        if not (yield from source.until(PYTHON_TAG, sink.say)):
            return
        opening = PYTHON_TAG


class _Call:
    """One call; what was read of it is kept until it is sure to be one."""

    def __init__(self, source: Source, sink: Sink, names: Collection[str], opening: str) -> None:
        self._source = source
        self._sink = sink
        self._names = names
        self._seen = [opening]
        self._name: str | None = None
        self._early: list[str] = []
        self._told = False

    def read(self) -> Reading[bool]:
        """Read the object of a call up to the end of its arguments; what turns out to be none is content."""
        called = (yield from self._symbol("{")) and (yield from self._members())
        if not called:
            self._sink.say("".join(self._seen))
        return called

    def _members(self) -> Reading[bool]:
        """Read keys and values up to the end of the arguments; false if they cannot be a call's."""
        while (yield from self._member()):
            if self._told:
                return True
            if self._name is not None and (self._early or (yield from self._symbol("}", take=False))):
                self._sink.begin(self._name)
                self._sink.argue("".join(self._early) or "{}")
                self._sink.end()
                return True
            if not (yield from self._symbol(",")):
                break
        return False

    def _member(self) -> Reading[bool]:
        """Read a key and its value; false if they cannot be a call's."""
        key = yield from self._string()
        if not (yield from self._symbol(":")):
            return False
        if key in _ARGUMENTS and not self._early:
            return (yield from self._symbol("{", take=False)) and (yield from self._object())
        value = yield from self._string()
        if key == "name" and self._name is None:
            self._name = value
            return value in self._names
        return key in _BESIDE and value is not None

    def _object(self) -> Reading[bool]:
        """Read the arguments: tell them at once where the name is known, else keep them."""
        if self._name is None:
            return (yield from self._arguments(self._hold))
        self._sink.begin(self._name)
        yield from self._arguments(self._sink.argue)
        self._sink.end()
        self._told = True
        return True

    def _hold(self, text: str) -> None:
        """Arguments that came before the name."""
        self._early.append(text)
        self._seen.append(text)

    def _take(self, text: str) -> None:
        self._source.skip(len(text))
        self._seen.append(text)

    def _symbol(self, wanted: str, *, take: bool = True) -> Reading[bool]:
        """Whether this character comes next, behind any blanks; read it, too, with ``take``."""
        self._seen.append((yield from self._source.run(BLANKS)))
        if (yield from self._source.peek()) != wanted:
            return False
        if take:
            self._take(wanted)
        return True

    def _string(self) -> Reading[str | None]:
        """Read a JSON string; None if there is none, or it is longer than any that a call has."""
        if not (yield from self._symbol('"')):
            return None
        text = escaped = ""
        while (character := (yield from self._source.peek())) and len(text) < _MAX_STRING:
            self._take(character)
            if character == '"' and not escaped:
                return _decoded(text)
            text += character
            escaped = "" if escaped or character != "\\" else character
        return None

    def _arguments(self, tell: Callable[[str], None]) -> Reading[bool]:
        """Tell an object to its closing brace; false if the text ends in it."""
        depth = 0
        inside = escaped = False
        while text := (yield from self._source.some()):
            for at, character in enumerate(text):
                if escaped:
                    escaped = False
                elif inside:
                    escaped = character == "\\"
                    inside = character != '"'
                elif character == '"':
                    inside = True
                elif character in "{}":
                    depth += 1 if character == "{" else -1
                    if not depth:
                        tell(text[: at + 1])
                        self._source.skip(at + 1)
                        return True
            tell(text)
            self._source.skip(len(text))
        return False


def _blanks_behind(text: str) -> str:
    return text[len(text.rstrip(BLANKS)) :]


def _decoded(text: str) -> str | None:
    try:
        decoded: str = json.loads(f'"{text}"')
    except ValueError:
        return None
    return decoded
