"""What pieces of a request's way cost, measured in characters of a text that is tokenised: so it is told what a worker thread is for."""

from __future__ import annotations

from typing import Final

from edgemesh.api.extent import SMALL_BYTES
from edgemesh.api.openai import ChatMessage, ChatRequest

INLINE_CHARS: Final = 512
"""Longer texts are tokenised in a worker thread: the tokenizer lets go of the interpreter's lock, and the way there takes as long as so many characters do."""

TURN_CHARS: Final = 64
"""What rendering one turn costs beside its text, in characters."""

TOOL_CHARS: Final = 256
"""About what describing a tool costs."""

WORD_CHARS: Final = 16
"""What calling the tokenizer costs beside the text."""

BODY_BYTES: Final = SMALL_BYTES // INLINE_CHARS
"""Bytes of a body that cost as much as a character: decoding and checking are quick, but hold the interpreter's lock."""

TOKENS: Final = 16
"""Tokens whose checking and packing cost as much."""


def of_chat(request: ChatRequest, body: bytes) -> int:
    """About how many characters of work it is to render and tokenise a chat that came in this body."""
    size = len(body) // BODY_BYTES
    if size > INLINE_CHARS:
        return size
    return sum(_length(message) for message in request.messages) + TOOL_CHARS * len(request.tools or ())


def _length(message: ChatMessage) -> int:
    """About how many characters of work a message is; one without text is some, too."""
    content = message.content
    if isinstance(content, list):
        return sum(TURN_CHARS + len(part.text) for part in content)
    calls = sum(TURN_CHARS + len(call.function.arguments) for call in message.tool_calls or ())
    return TURN_CHARS + len(content or "") + len(message.reasoning_content or "") + calls
