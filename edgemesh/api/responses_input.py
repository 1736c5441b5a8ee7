r"""The text that a custom tool is called with, out of the arguments that the model writes: ``{"input": "..."}``.

Arguments may be cut anywhere: what of an escape is still to come, and the second half of a pair of escapes, is waited
for. An escape that JSON does not know is text as it stands, and half a pair is U+FFFD.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from edgemesh.api.responses_toolbox import INPUT

_MOST: Final = 128
"""Characters before the text, at most."""

_OPENING: Final = re.compile(rf'[ \t\r\n]*{{[ \t\r\n]*"{INPUT}"[ \t\r\n]*:[ \t\r\n]*"')
_HEX: Final = "[0-9a-fA-F]"
_HIGH: Final = rf"\\u[dD][89abAB]{_HEX}{{2}}"
_PAIR: Final = rf"{_HIGH}\\u[dD][c-fC-F]{_HEX}{{2}}"
_PLAIN: Final = r'[^"\\]+|\\[^u]'
_CERTAIN: Final = re.compile(
    rf"(?:{_PLAIN}|{_PAIR}|(?!{_HIGH})\\u{_HEX}{{4}}|{_HIGH}(?=[^\\]|.{{6}})|\\u(?={_HEX}{{0,3}}[^0-9a-fA-F]))*",
    re.DOTALL,
)
"""Text whose meaning nothing that is still to come can change."""

_LAST: Final = re.compile(rf"(?:{_PLAIN}|\\u)*", re.DOTALL)
_ESCAPE: Final = re.compile(rf"{_PAIR}|\\u{_HEX}{{4}}|\\.", re.DOTALL)
_SIMPLE: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class CustomInput:
    """Reads arguments in pieces, and gives the text as it comes; arguments without one are the text themselves."""

    __slots__ = ("_held", "_inside", "_over")

    def __init__(self) -> None:
        self._held: list[str] = []
        self._inside = False
        self._over = False
        """Whether no more text comes from what comes: it is complete, or what comes is only held."""

    def feed(self, arguments: str) -> str:
        """More of the arguments; returns more of the text."""
        self._held.append(arguments)
        if self._over:
            return ""
        text = "".join(self._held)
        if not self._inside:
            opening = _OPENING.match(text[:_MOST])
            if opening is None:
                self._over = len(text) >= _MOST
                return ""
            self._inside = True
            text = text[opening.end() :]
        return self._take(text)

    def end(self) -> str:
        """No more comes; returns what was held back."""
        held = "".join(self._held)
        if not self._inside:
            return _text(held)
        if self._over:
            return ""
        found = _LAST.match(held)
        assert found is not None
        rest = held[found.end() :]
        return _decoded(found[0] + ("" if rest.startswith('"') else rest))

    def _take(self, text: str) -> str:
        found = _CERTAIN.match(text)
        assert found is not None
        rest = text[found.end() :]
        self._over = rest.startswith('"')
        self._held = [] if self._over else [rest]
        return _decoded(found[0])


def _decoded(text: str) -> str:
    return _ESCAPE.sub(_unescaped, text)


def _unescaped(found: re.Match[str]) -> str:
    text = found[0]
    if text[1] != "u":
        return _SIMPLE.get(text[1], text)
    if len(text) == 2:
        return text
    units = b"".join(int(half, 16).to_bytes(2, "big") for half in text.split("\\u")[1:])
    return units.decode("utf-16-be", "replace")


def _text(arguments: str) -> str:
    """The text of arguments that begin with something else."""
    try:
        found = msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    value = found.get(INPUT)
    return value if isinstance(value, str) else arguments
