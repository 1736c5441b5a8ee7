"""API keys of a gateway: read from a file and the environment, and read again when the file changes."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from edgemesh.api.errors import unauthorised
from edgemesh.api.keys import ApiKey, KeyFileError, KeyLimits, Keyring, parse_key, parse_keys, plain
from edgemesh.runtime.trace import Trace
from edgemesh.topology import Gateway

ENVIRONMENT: Final = "EDGEMESH_API_KEYS"
"""Keys beside those of the file, or their hashes, separated by commas."""

MAX_KEYS_BYTES: Final = 1 << 20

LOOK_S: Final = 1.0

Signature = tuple[int, int, int, int]


class ApiKeys:
    """Who may use the API; without any key, everyone, all as one caller with the limits ``shared``."""

    def __init__(self, keys: Iterable[ApiKey] = (), shared: KeyLimits | None = None) -> None:
        self._secret = secrets.token_bytes(32)
        self._everyone = ApiKey(limits=shared or KeyLimits())
        self.replace(keys)

    @property
    def asked(self) -> bool:
        """Whether anyone is asked for a key."""
        return bool(self._ring)

    def __len__(self) -> int:
        return len(self._ring)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """From now on these keys count, and no other."""
        self._ring = Keyring(keys, self._secret)

    def check(self, authorization: bytes) -> ApiKey:
        """The caller, by its ``Authorization`` header (without any key: everyone). Raises ``ApiError`` (401)."""
        if not self._ring:
            return self._everyone
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            message = "an API key is needed: `Authorization: Bearer KEY`, or `X-Api-Key: KEY`"
            raise unauthorised(message)
        found = self._ring.find(key.strip())
        if found is None:
            message = "the API key is not known"
            raise unauthorised(message)
        return found


class KeyWatch:
    """The keys, kept as the file says; while it cannot be used those before it count, and ``stale`` is true."""

    def __init__(self, file: KeyFile, shared: KeyLimits, trace: Trace) -> None:
        self._file = file
        self._trace = trace
        self.stale = False
        self.keys = ApiKeys(file.read(), shared)

    async def follow(self) -> None:
        """Look at the file every second until cancelled, in a thread: it may lie on a disk that is slow to answer."""
        while self._file.path is not None:
            await anyio.sleep(LOOK_S)
            try:
                keys = await anyio.to_thread.run_sync(self._file.look)
            except (OSError, ValueError) as error:
                self.stale = True
                self._trace.event("keys.refused", reason=str(error))
                continue
            if keys is not None:
                self.stale = False
                self.keys.replace(keys)
                self._trace.event("keys.loaded", count=len(keys))


def key_limits_of(gateway: Gateway) -> KeyLimits:
    """What the topology allows a key that says nothing else, and all clients together where no keys are asked for."""
    return KeyLimits(gateway.key_max_requests, gateway.key_requests_per_minute, gateway.key_tokens_per_minute)


def key_file_of(gateway: Gateway, environment: Mapping[str, str] = os.environ) -> KeyFile:
    """Where the keys of this topology come from. Raises ``ValueError``."""
    return KeyFile(gateway.api_keys_file, environment.get(ENVIRONMENT, ""), key_limits_of(gateway))


class KeyFile:
    """Where keys come from, read whole each time; a file that cannot be used is an error, and changes nothing.

    ``path`` empty: only the environment's. ``defaults`` are the limits of a key that states none of its own.
    """

    def __init__(self, path: str, environment: str, defaults: KeyLimits) -> None:
        self.path = Path(path).expanduser() if path else None
        self._defaults = defaults
        self._fixed = _of_environment(environment, defaults)
        self._read: Signature | None = None
        self._seen: Signature | None = None

    def read(self) -> list[ApiKey]:
        """All keys. Raises ``OSError`` and ``ValueError``: keys that are asked for and missing must not let everyone in."""
        if self.path is None:
            return self._fixed
        with self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            self._read = self._seen = _signature(found)
            data = file.read(MAX_KEYS_BYTES + 1)
        if len(data) > MAX_KEYS_BYTES:
            message = f"{self.path} is larger than {MAX_KEYS_BYTES} bytes"
            raise KeyFileError(message)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            message = f"{self.path} is not UTF-8 text"
            raise KeyFileError(message) from None  # the cause would show bytes of keys
        _check_private(self.path, found.st_mode, plain=plain(text))
        keys = parse_keys(text, self._defaults, str(self.path))
        known = {key.digest for key in keys}
        return [*keys, *(key for key in self._fixed if key.digest not in known)]

    def look(self) -> list[ApiKey] | None:
        """All keys if the file changed since it was read and is not being written; else None. Raises as ``read`` does."""
        if self.path is None:
            return None
        try:
            found: Signature | None = _signature(self.path.stat())
        except FileNotFoundError:
            found = None
        settled, self._seen = found == self._seen, found
        if found == self._read or not settled:
            return None
        self._read = found
        return self.read()


def _of_environment(text: str, defaults: KeyLimits) -> list[ApiKey]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if text.strip() and not words:
        message = f"{ENVIRONMENT} is set and holds no API key"
        raise KeyFileError(message)
    return list({key.digest: key for key in (parse_key(word, defaults, ENVIRONMENT) for word in words)}.values())


def _check_private(path: Path, mode: int, *, plain: bool) -> None:
    """Raise unless nobody else can read keys, or add any."""
    if mode & (stat.S_IRWXG | stat.S_IRWXO if plain else stat.S_IWGRP | stat.S_IWOTH):
        what = "holds API keys in plain text and is open to others" if plain else "can be written by others"
        message = f"{path} {what} (mode {stat.S_IMODE(mode):04o}); run: chmod 600 {path}, or keep hashes there (edgemesh api key)"
        raise KeyFileError(message)


def _signature(found: os.stat_result) -> Signature:
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
