"""Calls of tools as Qwen3-Coder writes them: no JSON, but a tag for the function and one for each argument.

::

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The outer tag may be missing. A value has a line of its own or several, whose line ends beside the tags are the tags'. What
it is, its tool's schema says: a text, told as it comes, or JSON; where that is none, it is a text all the same.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

from edgemesh.api.events import BLANKS, Sink
from edgemesh.api.source import Reading, Source
from edgemesh.api.tool_texts import Texts
from edgemesh.api.tool_types import MAX_NAME

FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"

_TAG: Final = "tool_call>"
_CLOSE: Final = "</tool_call>"
_PYTHONS: Final = {"True": "true", "False": "false", "None": "null"}


def coder(source: Source, sink: Sink, names: Collection[str], texts: Texts) -> Reading[None]:
    """Read a message to its end, or to the last call that may come."""
    while (yield from source.until("<", sink.say)):
        opening, function = "<", FUNCTION[1:]
        if (yield from source.match(_TAG)):
            opening, function = f"<{_TAG}" + (yield from source.run(BLANKS)), FUNCTION
        if not (yield from source.match(function)):
            sink.say(opening)
            continue
        name = yield from _name(source)
        if name not in names or not (yield from source.match(">")):
            sink.say(opening + function + name)
            continue
        sink.begin(name)
        yield from _arguments(source, sink, name, texts)
        sink.end()
        if sink.full:
            return
        behind = yield from source.run(BLANKS)
        if not (yield from source.match(_CLOSE)):
            sink.say(behind)


def _name(source: Source) -> Reading[str]:
    name = ""
    while len(name) < MAX_NAME and (character := (yield from source.peek())) and character not in "<>\n":
        name += character
        source.skip(1)
    return name


def _arguments(source: Source, sink: Sink, name: str, texts: Texts) -> Reading[None]:
    """Tell the arguments as JSON, which ends where the text does."""
    before = "{"
    sink.argue(before)
    while True:
        yield from source.run(BLANKS)
        if not (yield from source.match(PARAMETER)):
            break
        parts: list[str] = []
        if not (yield from source.until(">", parts.append)):
            return
        key = "".join(parts)
        sink.argue(("" if before == "{" else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        before = ","
        yield from source.match("\n")
        value = _text if (name, key) in texts.always else _value
        if not (yield from value(source, sink, (name, key), texts)):
            return
    if (yield from source.match(FUNCTION_END)) or (yield from source.peek()):
        sink.argue("}")


def _text(source: Source, sink: Sink, place: tuple[str, str], texts: Texts) -> Reading[bool]:
    """Tell a text as it comes, up to its closing tag; false where there is none."""
    del place, texts
    ends: list[str] = []

    def tell(text: str) -> None:
        """Tell all but a line end, which may be the tag's."""
        text = "".join([*ends, text])
        ends.clear()
        if text.endswith("\n"):
            text = text[:-1]
            ends.append("\n")
        sink.argue(_inside(text))

    sink.argue('"')
    closed = yield from source.until(PARAMETER_END, tell)
    if closed:
        sink.argue('"')
    return closed


def _value(source: Source, sink: Sink, place: tuple[str, str], texts: Texts) -> Reading[bool]:
    """Tell a value that may be JSON, once it is there; false where its closing tag is missing."""
    parts: list[str] = []
    if not (yield from source.until(PARAMETER_END, parts.append)):
        return False
    value = "".join(parts).removesuffix("\n")
    sink.argue(_json(value, text=place in texts.nullable))
    return True


def _json(value: str, *, text: bool) -> str:
    """A value as JSON: with ``text`` it is one, or null."""
    bare = value.strip()
    bare = _PYTHONS.get(bare, bare)
    if bare == "null":
        return bare
    try:
        if not text and bare:
            # Numbers of any size are numbers.
            json.loads(bare, parse_int=str, parse_float=str, parse_constant=_no_json)
            return bare
    except (ValueError, RecursionError):
        pass
    return f'"{_inside(value)}"'


def _no_json(constant: str) -> None:
    raise ValueError(constant)


def _inside(text: str) -> str:
    """A text as it stands in a JSON string; each character is written by itself."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
