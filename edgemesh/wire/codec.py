"""Messages to frames and back: msgpack in the first frame, each token array in one of its own.

Decoding is typed by the union of the link that the frames came from, so a message that does not belong there
is not a message at all. Every failure is a ``WireError``; nothing is looked up by name, nothing is executed.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Message

MAX_FRAMES: Final = 1024
MAX_FRAME_BYTES: Final = 64 << 20
INLINE_BYTES: Final = 512
"""An array up to this size stays inside the first frame: a frame of its own would cost more than the copy."""

_INLINE: Final = 1
_FRAME: Final = 2

Buffer = bytes | memoryview
M = TypeVar("M", bound=Message)


class WireError(ValueError):
    """Frames that are not a message of the union that was expected."""


def encode(message: Message) -> list[Buffer]:
    """The frames of a message: the struct first, then the larger arrays in the order of their use."""
    frames: list[Buffer] = [b""]

    def carry(value: Any) -> Any:  # noqa: ANN401 - msgspec's hook takes any unknown type
        if not isinstance(value, TokenArray):
            kind = type(value).__name__
            raise NotImplementedError(kind)
        if value.buffer.nbytes <= INLINE_BYTES:
            return msgspec.msgpack.Ext(_INLINE, value.buffer)
        frames.append(value.buffer)
        return msgspec.msgpack.Ext(_FRAME, (len(frames) - 1).to_bytes(2, "little"))

    frames[0] = msgspec.msgpack.encode(message, enc_hook=carry)
    return frames


class Decoder(Generic[M]):
    """Decodes the messages of one union.

    Raises ``WireError`` for anything else: bytes that are no msgpack, a type outside the union, a field
    out of bounds, an array frame that is missing, repeated, unused or too large.
    """

    def __init__(self, *types: type[M]) -> None:
        union: Any = types[0]
        for each in types[1:]:
            union |= each
        self.types = types
        self._frames: Sequence[Buffer] = ()
        self._used = 0
        hook: Callable[[int, memoryview], Any] = self._fetch
        self._decode = msgspec.msgpack.Decoder(union, ext_hook=hook, dec_hook=_array).decode

    def decode(self, frames: Sequence[Buffer]) -> M:
        """The message that these frames hold."""
        if not 1 <= len(frames) <= MAX_FRAMES:
            message = f"{len(frames)} frames; a message has 1 to {MAX_FRAMES}"
            raise WireError(message)
        for frame in frames:
            size = len(frame)
            if size > MAX_FRAME_BYTES:
                message = f"a frame of {size} bytes; the most is {MAX_FRAME_BYTES}"
                raise WireError(message)
        self._frames, self._used = frames, 1
        try:
            decoded: M = self._decode(frames[0])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise WireError(str(error)) from error
        finally:
            self._frames = ()
        if self._used != len(frames):
            message = f"{len(frames)} frames, of which the message uses {self._used}"
            raise WireError(message)
        return decoded

    def _fetch(self, code: int, data: memoryview) -> TokenArray:
        if code == _INLINE:
            # The decoder's buffer lives as long as this view: the bytes of the first frame.
            return TokenArray(bytes(data))
        if code == _FRAME and len(data) == 2 and int.from_bytes(data, "little") == self._used < len(self._frames):
            self._used += 1
            return TokenArray(self._frames[self._used - 1])
        message = f"extension {code} does not name the next array frame"
        raise WireError(message)


def _array(kind: type, value: Any) -> Any:  # noqa: ANN401 - msgspec's hook takes any unknown type
    if isinstance(value, kind):
        return value
    message = f"expected `{kind.__name__}`, got `{type(value).__name__}`"
    raise TypeError(message)
