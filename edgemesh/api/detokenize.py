"""Token ids to text, a few at a time, without ever splitting a character.

A token is a run of bytes; text is what those bytes say in UTF-8. At most three bytes of an unfinished character are
kept, so the cost of a token does not depend on how many came before it. Bytes that are no UTF-8 become U+FFFD, as the
Unicode standard recommends (and as Rust's and Python's decoders do).
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

BytesOf = Callable[[str], bytes]


class AddedToken(msgspec.Struct, frozen=True):
    """A token beside the tokenizer's own vocabulary."""

    id: int
    content: str
    special: bool = False


class TokenizerFile(msgspec.Struct, frozen=True):
    """What of ``tokenizer.json`` says how ids become text."""

    decoder: dict[str, Any] | None = None
    added_tokens: list[AddedToken] = []


class Pieces:
    """The bytes of every token of one tokenizer, found once per token.

    Special tokens whose content is in ``shown`` are text even where special tokens are skipped.
    """

    def __init__(self, tokenizer: Tokenizer, file: TokenizerFile, shown: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._bytes_of = bytes_of(file.decoder)
        self._special = frozenset(
            token.id for token in file.added_tokens if token.special and token.content not in shown
        )
        self._bytes: dict[int, bytes] = {}
        self.texts: dict[int, str | None] = {}
        self.texts_without_special: dict[int, str | None] = {}
        """Token to text; None where the token's bytes alone are not whole characters."""

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; none for an id that the tokenizer does not know."""
        piece = self._bytes.get(token)
        if piece is None:
            content = self._tokenizer.id_to_token(token)
            piece = self._bytes[token] = b"" if content is None else self._bytes_of(content)
        return piece

    def name_of(self, token: int) -> str:
        """How log-probabilities name a token."""
        return self.bytes_of(token).decode(errors="replace")

    @property
    def plain(self) -> Pieces:
        """The same tokens under their own names."""
        return self

    def learn(self, token: int, *, skip_special: bool) -> str | None:
        """Find and remember a token's text."""
        text: str | None
        if skip_special and token in self._special:
            text = ""
        else:
            try:
                text = self.bytes_of(token).decode()
            except UnicodeDecodeError:
                text = None
        (self.texts_without_special if skip_special else self.texts)[token] = text
        return text


class IdPieces(Pieces):
    """The same tokens, named by their ids: so no two have the same name."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token."""
        return self._pieces.bytes_of(token)

    @property
    def plain(self) -> Pieces:
        """The tokens whose ids these are."""
        return self._pieces

    def name_of(self, token: int) -> str:
        """Its id."""
        return f"token_id:{token}"


class Detokenizer:
    """The text of one stream of tokens."""

    __slots__ = ("_pieces", "_rest", "_skip_special", "_texts")

    def __init__(self, pieces: Pieces, *, skip_special: bool = True) -> None:
        self._pieces = pieces
        self._skip_special = skip_special
        self._texts = pieces.texts_without_special if skip_special else pieces.texts
        self._rest = b""

    def feed(self, tokens: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        parts = []
        texts = self._texts
        for token in tokens:
            text = texts[token] if token in texts else self._pieces.learn(token, skip_special=self._skip_special)
            if text is None or (self._rest and text):
                rest = self._rest + self._pieces.bytes_of(token)
                text, used = utf_8_decode(rest, "replace", False)  # noqa: FBT003 - the codec takes it by position
                self._rest = rest[used:]
            parts.append(text)
        return "".join(parts)

    def finish(self) -> str:
        """What an unfinished character at the end becomes."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


def bytes_of(decoder: dict[str, Any] | None) -> BytesOf:
    """How the ``decoder`` section of a ``tokenizer.json`` turns a token's content to bytes.

    Raises ``ValueError`` for a kind of decoder that no supported model family has. A step that strips the whole
    text's first blank is left out: a stream goes on after a prompt.
    """
    match decoder:
        case {"type": "ByteLevel"}:
            return _byte_level
        case {"type": "Metaspace", "replacement": str(mark)}:
            return lambda content: content.replace(mark, " ").encode()
        case {"type": "Sequence", "decoders": list(steps)}:
            return _sequence([_step(step) for step in steps])
    kind = decoder.get("type") if decoder else None
    message = f"tokenizer.json has a decoder of type {kind!r}; supported are ByteLevel, Metaspace and Sequence"
    raise ValueError(message)


Step = Callable[[str], str | bytes]


def _step(step: dict[str, Any]) -> Step:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return lambda content: content.replace(old, new)
        case {"type": "Metaspace", "replacement": str(mark)}:
            return lambda content: content.replace(mark, " ")
        case {"type": "ByteFallback"}:
            return _byte_fallback
        case {"type": "ByteLevel"}:
            return _byte_level
        case {"type": "Fuse" | "Strip"}:
            return lambda content: content
    message = f"tokenizer.json has a decoder step of type {step.get('type')!r}, which is not supported"
    raise ValueError(message)


def _sequence(steps: list[Step]) -> BytesOf:
    def convert(content: str) -> bytes:
        for step in steps:
            result = step(content)
            if isinstance(result, bytes):
                return result
            content = result
        return content.encode()

    return convert


def _byte_fallback(content: str) -> str | bytes:
    if len(content) == 6 and content.startswith("<0x") and content.endswith(">"):
        try:
            return bytes([int(content[3:5], 16)])
        except ValueError:
            return content
    return content


def _printable() -> dict[str, int]:
    """GPT-2's alphabet: each byte as a printable character; the others are shifted behind the first 256."""
    table = {}
    shifted = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            table[chr(byte)] = byte
        else:
            table[chr(shifted)] = byte
            shifted += 1
    return table


_BYTES: Final = _printable()


def _byte_level(content: str) -> bytes:
    try:
        return bytes([_BYTES[each] for each in content])
    except KeyError:
        # An added token's content is plain text, which the alphabet need not have.
        return content.encode()
