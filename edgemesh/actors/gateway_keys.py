"""API keys: kept as digests, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from edgemesh.api.errors import unauthorised

ENVIRONMENT: Final = "EDGEMESH_API_KEYS"
"""Keys beside those of the file, separated by commas."""

MAX_KEYS_BYTES: Final = 1 << 20


class ApiKeys:
    """Who may use the API; without any key, everyone."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(dict.fromkeys(_digest(key.encode()) for key in keys))

    @property
    def asked(self) -> bool:
        """Whether anyone is asked for a key."""
        return bool(self._digests)

    def check(self, authorization: bytes) -> str:
        """The caller's fairness key ("" where no keys are asked for), from its ``Authorization`` header. Raises 401."""
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            message = "an API key is needed: `Authorization: Bearer KEY`"
            raise unauthorised(message)
        digest = _digest(key.strip())
        known = [hmac.compare_digest(digest, each) for each in self._digests]
        if not any(known):
            message = "the API key is not known"
            raise unauthorised(message)
        return digest[:8].hex()


def read_keys(path: str, environment: str) -> ApiKeys:
    """Keys of a file (one a line; a line that begins with ``#`` is a comment) and of the environment.

    Raises ``OSError``, and ``ValueError`` where keys are asked for and there is none: that must not let everyone in.
    """
    keys = [key.strip() for key in environment.split(",") if key.strip()]
    if environment.strip() and not keys:
        message = f"{ENVIRONMENT} is set and holds no API key"
        raise ValueError(message)
    if path:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(MAX_KEYS_BYTES + 1)
        if len(text) > MAX_KEYS_BYTES:
            message = f"{path} is larger than {MAX_KEYS_BYTES} bytes"
            raise ValueError(message)
        found = [line for each in text.splitlines() if (line := each.strip()) and not line.startswith("#")]
        if not found:
            message = f"{path} holds no API key"
            raise ValueError(message)
        keys += found
    return ApiKeys(keys)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
