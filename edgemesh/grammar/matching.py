"""llguidance behind a small surface: a source compiles to a matcher, which says what may follow and takes what did.

Sources are what llguidance takes as one string: a JSON object ``{"grammars": [...]}``, or Lark text that begins with
``%llguidance {}``.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_REASON: Final = 300
"""Characters of a reason that a client reads."""

KEPT: Final = 64
KEPT_CHARACTERS: Final = 4 << 20
"""Compiled sources that are kept for the next request with the same one: how many, and how long together."""

DEAD_END: Final = "NoExtensionBias"
"""How the library says that nothing may follow, found out late."""

LEXER_STATES: Final = 50_000
"""Of one matcher; each takes one or two kilobytes."""


class GrammarError(ValueError):
    """A source, or a tokenizer, that cannot be used; the message is one sentence."""


class Grammars:
    """All grammars of one model.

    ``tokenizer_json`` is the file's content; ``vocab_size`` is that of the logits, which may be padded beyond the tokenizer's tokens.
    Raises ``GrammarError`` for a tokenizer whose tokens' bytes cannot be told.
    """

    def __init__(self, tokenizer_json: bytes, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        try:
            # Anything but JSON would be taken for the name of a file.
            text = tokenizer_json.decode().strip()
            if not text.startswith("{"):
                message = "it is no JSON object"
                raise ValueError(message)  # noqa: TRY301 - the library's own errors are told alike
            self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        except (ValueError, RuntimeError) as error:
            message = f"tokenizer.json: {_sentence(str(error))}"
            raise GrammarError(message) from error
        self._limits = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._ends = _bits(eos_token_ids)
        self._mask_bytes = -(-vocab_size // 32) * 4

    def check(self, source: str) -> str:
        """Why nothing can be generated under this source, in a sentence; nothing if it can."""
        try:
            self.matcher(source).mask()
        except GrammarError as error:
            return str(error)
        return ""

    def matcher(self, source: str) -> "Matcher":
        """A matcher at the start of the source. Raises ``GrammarError`` for one that does not compile."""
        compiled = self._kept.pop(source, None)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
            if compiled.is_error():
                raise GrammarError(_sentence(compiled.get_error()))
        self._kept[source] = compiled
        while len(self._kept) > KEPT or sum(map(len, self._kept)) > KEPT_CHARACTERS:
            self._kept.popitem(last=False)
        return Matcher(compiled.deep_copy(), self._ends, self._mask_bytes)


class Matcher:
    """One stream's way through a grammar."""

    def __init__(self, matcher: LLMatcher, ends: int, mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._ends = ends
        self.ended = False
        """Nothing but the end may follow; known after ``mask``."""

    def mask(self) -> bytes:
        """A bit for each token id, set where it may follow, in bytes from the lowest bit on and whole 32-bit words.

        Raises ``GrammarError`` where nothing may follow though the sentence is not whole, and where that takes too much to find out.
        """
        matcher = self._matcher
        # The library's has a word more than a vocabulary of whole words needs.
        mask = (
            b""
            if matcher.is_stopped()
            else matcher.compute_bitmask()[: self._mask_bytes].ljust(self._mask_bytes, b"\0")
        )
        if matcher.is_error() and not matcher.get_error().startswith(DEAD_END):
            raise GrammarError(_sentence(matcher.get_error()))
        self.ended = not int.from_bytes(mask, "little") & ~self._ends
        if self.ended and not matcher.is_accepting():
            message = "the grammar leads to where no text can follow, though none that it describes is complete"
            raise GrammarError(message)
        return mask

    def accept(self, token: int) -> bool:
        """Take the next token; False for one that may not follow, after which the matcher is of no use."""
        return self._matcher.consume_token(token)


def _bits(ids: Iterable[int]) -> int:
    bits = 0
    for each in ids:
        bits |= 1 << each
    return bits


def _sentence(reason: str) -> str:
    """The library's words on one line, cut where they show its state."""
    words = " ".join(reason.partition("<state>")[0].split())
    return words if len(words) <= MAX_REASON else f"{words[: MAX_REASON - 3]}..."
