"""Words that may not come to stand in the output, as the tokens that would write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from edgemesh.api.errors import invalid
from edgemesh.api.text import ModelText

MAX_TOKENS: Final = 64
"""Tokens of one word."""

MAX_TOGETHER: Final = 4096
"""Tokens of all forms of all words: they travel with every choice, and many choices may share a message."""


def bad_words(text: ModelText, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of each word, as it begins a text and as it follows a blank. Raises ``ApiError``."""
    total = 0
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = word.lstrip(" ") or word
        for form in (bare, f" {bare}"):
            tokens = tuple(text.encode(form, add_special_tokens=False))
            if not 0 < len(tokens) <= MAX_TOKENS:
                message = f"`bad_words[{index}]` makes {len(tokens)} tokens; a word has 1 to {MAX_TOKENS}"
                raise invalid(message, f"bad_words[{index}]")
            total += len(tokens) if tokens not in found else 0
            if total > MAX_TOGETHER:
                message = f"`bad_words` make more than {MAX_TOGETHER} tokens, the most that they may have together"
                raise invalid(message, "bad_words")
            found[tokens] = None
    return tuple(found)
