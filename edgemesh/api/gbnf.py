"""GBNF, the grammars of llama.cpp, as Lark text for llguidance.

A rule that reaches no recursion becomes a terminal: a lexer matches it in one piece, which is quick; the others are rules. A
lexer takes the longest text that a terminal can match, so where a grammar needs a shorter one the output is still
in the grammar, but not every text of the grammar can be an output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

import msgspec

_TOKEN: Final = re.compile(
    r"""(?P<blank>(?:\s|\#[^\n]*)+)
      | (?P<rule>[A-Za-z][\w-]*\s*::=)
      | (?P<name>[A-Za-z][\w-]*)
      | "(?P<text>(?:[^"\\\n]|\\.)*)"
      | \[(?P<set>(?:[^\]\\\n]|\\.)+)\]
      | (?P<repeat>\{\s*\d{1,6}\s*(?:,\s*(?:\d{1,6}\s*)?)?\})
      | (?P<mark>[()|*+?.])""",
    re.VERBOSE | re.ASCII,
)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_NAMED: Final = {"n": "\n", "r": "\r", "t": "\t"}
_SHOWN: Final = 40


class GbnfError(ValueError):
    """A text that is no GBNF; the message says where and why."""


class _Rule(msgspec.Struct):
    """One rule: its parts in Lark, where a part that names another rule stands as ``(name,)``."""

    line: int
    parts: list[str | tuple[str]] = []

    def names(self) -> Iterator[str]:
        """The rules that it names."""
        return (part[0] for part in self.parts if isinstance(part, tuple))


def lark(text: str) -> str:
    """The grammar in Lark, from the rule ``root``. Raises ``GbnfError``."""
    rules = _rules(text)
    if "root" not in rules:
        message = "there is no rule `root`"
        raise GbnfError(message)
    for name, rule in rules.items():
        for other in rule.names():
            if other not in rules:
                message = f"rule `{name}` in line {rule.line} names `{other}`, which is no rule"
                raise GbnfError(message)
    flat = _flat(rules)
    named = {name: f"{'T' if name in flat else 'r'}{place}" for place, name in enumerate(rules)}
    lines = [f"start: {named['root']}"]
    for name, rule in rules.items():
        body = " ".join(part if isinstance(part, str) else named[part[0]] for part in rule.parts)
        lines.append(f"{named[name]}: {body}")
    return "\n".join(lines)


def _rules(text: str) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    current: _Rule | None = None
    at, line = 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            message = f"line {line}: {json.dumps(text[at : at + _SHOWN])} is not understood"
            raise GbnfError(message)
        if found["rule"] is not None:
            name = found["rule"].removesuffix("::=").rstrip()
            if name in rules:
                message = f"line {line}: rule `{name}` is there twice"
                raise GbnfError(message)
            current = rules[name] = _Rule(line)
        elif found["blank"] is None:
            if current is None:
                message = f"line {line}: a rule begins with `name ::=`"
                raise GbnfError(message)
            current.parts.append(_part(found, line))
        line += found[0].count("\n")
        at = found.end()
    return rules


def _part(found: re.Match[str], line: int) -> str | tuple[str]:
    """One token of a rule's body, in Lark."""
    if found["name"] is not None:
        return (found["name"],)
    if found["text"] is not None:
        return json.dumps(_plain(found["text"], line))
    if found["set"] is not None:
        return f"/{_set(found['set'], line)}/"
    if found["repeat"] is not None:
        return "".join(found["repeat"].split())
    return r"/(?s:.)/" if found["mark"] == "." else found["mark"]


def _plain(text: str, line: int) -> str:
    """A literal without its escapes."""

    def plain(escape: re.Match[str]) -> str:
        number = escape[1] or escape[2] or escape[3]
        if number is None:
            return _NAMED.get(escape[4], escape[4])
        if int(number, 16) > 0x10FFFF or 0xD800 <= int(number, 16) < 0xE000:
            message = f"line {line}: {escape[0]} is no character"
            raise GbnfError(message)
        return chr(int(number, 16))

    return _ESCAPE.sub(plain, text)


def _set(text: str, line: int) -> str:
    """A set of characters as a regular expression's, each character spelled by its number."""
    negated, text = text[0] == "^", text.removeprefix("^")
    members = re.findall(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)|.", text, re.DOTALL)
    spelled, place = [], 0
    while place < len(members):
        low = high = _plain(members[place], line)
        if place + 2 < len(members) and members[place + 1] == "-":
            high = _plain(members[place + 2], line)
            place += 2
        if low > high:
            message = f"line {line}: in [{text[:_SHOWN]}] a range runs backwards"
            raise GbnfError(message)
        spelled.append(f"\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}")
        place += 1
    return f"[{'^' if negated else ''}{''.join(spelled)}]"


def _flat(rules: dict[str, _Rule]) -> set[str]:
    """The rules that reach no recursion."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    open_names = {name: set(rule.names()) for name, rule in rules.items()}
    for name, others in open_names.items():
        for other in others:
            users[other].append(name)
    due = [name for name, others in open_names.items() if not others]
    flat: set[str] = set()
    while due:
        name = due.pop()
        flat.add(name)
        for user in users[name]:
            open_names[user].discard(name)
            if not open_names[user]:
                due.append(user)
    return flat
