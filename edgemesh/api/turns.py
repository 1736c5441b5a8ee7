"""A turn's text; and a conversation in fewer turns, for templates that want a system's at the beginning alone, or no role twice."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgemesh.api.openai import ChatMessage

_SYSTEM = frozenset({"system", "developer"})
_JOINED = frozenset({"system", "user"})


def merged(messages: Sequence[ChatMessage]) -> list[ChatMessage] | None:
    """The turns with those of one role in a row as one, and a system's words among the others as the user's.

    None where that changes nothing.
    """
    turns: list[ChatMessage] = []
    for message in messages:
        turn = message
        if message.role in _SYSTEM:
            first = all(each.role == "system" for each in turns)
            turn = msgspec.structs.replace(message, role="system" if first else "user")
        last = turns[-1] if turns else None
        if last is not None and turn.role in _JOINED and (last.role, last.name) == (turn.role, turn.name):
            turns[-1] = msgspec.structs.replace(last, content=f"{text_of(last)}\n\n{text_of(turn)}")
        else:
            turns.append(turn)
    changed = len(turns) < len(messages) or any(a.role != b.role for a, b in zip(turns, messages, strict=True))
    return turns if changed else None


def text_of(message: ChatMessage) -> str:
    """A message's text, of all its parts."""
    content = message.content
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or ())
