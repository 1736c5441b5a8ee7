"""API keys: what a line of the key file says, whose a key is, and what that caller may ask for.

A key itself is never kept: its digest is, and it is looked up by a keyed hash of that, so that the time which a lookup takes
says nothing of any key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

MAX_KEYS: Final = 4096
MAX_KEY_CHARS: Final = 512
MOST: Final = 1 << 40
HASHED: Final = "sha256:"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX: Final = re.compile(r"[0-9a-fA-F]{64}")

Bound = Annotated[int, Meta(ge=0, le=MOST)]


class KeyLimits(msgspec.Struct, frozen=True):
    """What one key may have; 0: without a bound."""

    max_requests: Bound = 0
    """Requests open at once."""

    requests_per_minute: Bound = 0
    tokens_per_minute: Bound = 0
    """Tokens of prompts and of output together."""

    @property
    def any(self) -> bool:
        """Whether anything is bounded."""
        return bool(self.max_requests or self.requests_per_minute or self.tokens_per_minute)


OPTIONS: Final = KeyLimits.__struct_fields__


class ApiKey(msgspec.Struct, frozen=True):
    """One caller; without a digest: everyone, where no keys are asked for."""

    digest: bytes = b""
    name: str = ""
    limits: KeyLimits = KeyLimits()

    @property
    def id(self) -> str:
        """What the mesh tells callers apart by; empty where no keys are asked for."""
        return self.digest[:8].hex()


class KeyFileError(ValueError):
    """A key file cannot be used; the message names the line, and never holds a key."""


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()


def hashed_line(key: str, name: str = "", limits: KeyLimits | None = None) -> str:
    """The line of a key file that knows a key without holding it.

    >>> hashed_line("k", "agents", KeyLimits(max_requests=2))[:20], hashed_line("k", "agents")[-12:]
    ('sha256:8254c329a9285', ' name=agents')
    """
    words = [HASHED + digest_of(key.encode()).hex()]
    if name:
        words.append(f"name={name}")
    given = msgspec.structs.asdict(limits) if limits is not None else {}
    words += [f"{option}={bound}" for option, bound in given.items() if bound]
    return " ".join(words)


def parse_keys(text: str, defaults: KeyLimits, what: str) -> list[ApiKey]:
    """The keys of a file's text, one a line: a key or its hash, then options. A line that begins with ``#`` is a comment.

    ``what`` is what errors call the file. Raises ``KeyFileError``.
    """
    found: dict[bytes, tuple[int, ApiKey]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key = _parse_line(words, defaults, f"{what}, line {number}")
        if key.digest in found:
            message = f"{what}, line {number}: the same key stands in line {found[key.digest][0]}"
            raise KeyFileError(message)
        found[key.digest] = number, key
    if not found:
        message = f"{what} holds no API key"
        raise KeyFileError(message)
    if len(found) > MAX_KEYS:
        message = f"{what} holds {len(found)} API keys; the most is {MAX_KEYS}"
        raise KeyFileError(message)
    return [key for _, key in found.values()]


def parse_key(word: str, limits: KeyLimits, where: str) -> ApiKey:
    """A key or its hash, with the default limits. Raises ``KeyFileError``."""
    if word.startswith(HASHED):
        if not _HEX.fullmatch(word[len(HASHED) :]):
            message = f"{where}: after {HASHED} come 64 hexadecimal digits"
            raise KeyFileError(message)
        return ApiKey(bytes.fromhex(word[len(HASHED) :]), limits=limits)
    if len(word) > MAX_KEY_CHARS or not word.isascii() or not word.isprintable():
        message = f"{where}: a key is at most {MAX_KEY_CHARS} printable ASCII characters without spaces"
        raise KeyFileError(message)
    return ApiKey(digest_of(word.encode()), limits=limits)


def plain(text: str) -> bool:
    """Whether a key file's text holds a key that is not hashed."""
    lines = (line.strip() for line in text.splitlines())
    return any(line and not line.startswith(("#", HASHED)) for line in lines)


def _parse_line(words: list[str], defaults: KeyLimits, where: str) -> ApiKey:
    key = parse_key(words[0], defaults, where)
    given: dict[str, str] = {}
    for word in words[1:]:
        option, equals, value = word.partition("=")
        if not equals or option in given or option not in {"name", *OPTIONS}:
            # The word is not repeated: it may belong to a key.
            message = (
                f"{where}: after the key may stand, each once, name=NAME, {', '.join(f'{each}=N' for each in OPTIONS)}"
            )
            raise KeyFileError(message)
        given[option] = value
    name = given.pop("name", "")
    if name and not _NAME.fullmatch(name):
        message = f"{where}: name is 1 to 64 letters, digits, dots, dashes and underscores"
        raise KeyFileError(message)
    bounds = {option: _bound(option, value, where) for option, value in given.items()}
    return ApiKey(key.digest, name, msgspec.structs.replace(defaults, **bounds))


def _bound(option: str, value: str, where: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 14 and int(value) <= MOST):
        message = f"{where}: {option} is a whole number from 0 (no bound) to {MOST}"
        raise KeyFileError(message)
    return int(value)


class Keyring:
    """Finds whose a key is; ``secret`` is this process's own."""

    def __init__(self, keys: Iterable[ApiKey], secret: bytes) -> None:
        self._secret = secret
        self._keys = {self._mac(key.digest): key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: bytes) -> ApiKey | None:
        """The caller that this key belongs to."""
        return self._keys.get(self._mac(digest_of(key)))

    def _mac(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()
