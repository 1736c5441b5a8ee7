"""How a rank gets its memory: one ``Lease`` over the vault's Unix socket, one ``Grant`` back with descriptors beside it.

A message on this socket is its length in four bytes, then its frame. The descriptors travel by ``SCM_RIGHTS`` with the
length, so they are there before anything that names them is read.
"""

import array
import os
import socket
import struct
from pathlib import Path
from typing import Final

import msgspec
import torch

from edgemesh.engine.memory import MemoryFault, Region, tensors
from edgemesh.engine.shape import ModelShape
from edgemesh.wire.codec import Decoder, WireError, encode
from edgemesh.wire.messages import Grant, Lease, Message

MAX_DESCRIPTORS: Final = 253
"""The kernel's limit for one message (``SCM_MAX_FD``)."""

MAX_MESSAGE_BYTES: Final = 16 << 20

_LENGTH: Final = struct.Struct("<I")
_GRANT: Final = Decoder(Grant)
_LEASE: Final = Decoder(Lease)


class LeaseRefused(Exception):  # noqa: N818 - it names what happened
    """The vault gave nothing: it is not there, does not know the rank, or serves a later epoch."""


class Leased(msgspec.Struct, frozen=True):
    """A rank's memory: what the vault found, the model's shape, and every tensor by name."""

    grant: Grant
    shape: ModelShape
    tensors: dict[str, torch.Tensor]


def lease(path: Path | str, request: Lease, timeout_s: float = 60.0) -> Leased:
    """Ask the vault at a socket for a rank's memory. Raises ``LeaseRefused`` or ``MemoryFault``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            send_message(connection, request)
            frame, descriptors = receive_message(connection, MAX_DESCRIPTORS)
        except (OSError, EOFError, WireError) as error:
            message = f"{request.actor} got no memory from the vault at {path}: {error or type(error).__name__}"
            raise LeaseRefused(message) from error
    return _leased(frame, descriptors)


def _leased(frame: bytes, descriptors: list[int]) -> Leased:
    opened: list[Region] = []
    try:
        grant = _GRANT.decode([frame])
        shape = msgspec.json.decode(grant.shape, type=ModelShape)
        if grant.card is not None:
            from edgemesh.engine.cuda.ipc import opened as opened_on_card  # noqa: PLC0415 - where there is a card

            return Leased(grant, shape, opened_on_card(grant, os.environ))
        if len(grant.region_bytes) != len(descriptors):
            message = f"{len(grant.region_bytes)} regions were granted, {len(descriptors)} descriptors came"
            raise MemoryFault(message)
        for fd, nbytes in zip(descriptors, grant.region_bytes, strict=True):
            opened.append(Region.adopt(fd, nbytes))
        return Leased(grant, shape, tensors(grant.tensors, opened))
    except (WireError, msgspec.DecodeError) as error:
        message = f"the vault's grant cannot be read: {error}"
        raise MemoryFault(message) from error
    finally:
        # The mappings keep the memory; descriptors are not needed once it is mapped.
        for fd in descriptors:
            os.close(fd)


def send_message(connection: socket.socket, message: Message, descriptors: list[int] | None = None) -> None:
    """One message, with descriptors beside it; the connection is blocking or has a timeout."""
    frame, *rest = encode(message)
    if rest or len(frame) > MAX_MESSAGE_BYTES or len(descriptors or ()) > MAX_DESCRIPTORS:
        text = f"{type(message).__name__} of {len(frame)} bytes with {len(descriptors or ())} descriptors is too large"
        raise WireError(text)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    length = _LENGTH.pack(len(frame))
    sent = connection.sendmsg([length], rights)
    connection.sendall(length[sent:])
    connection.sendall(frame)


def receive_message(connection: socket.socket, most_descriptors: int) -> tuple[bytes, list[int]]:
    """One message and its descriptors, which the caller must close.

    Raises ``EOFError`` if the peer hangs up before the end, ``WireError`` for a length or number of descriptors out of bounds.
    """
    space = socket.CMSG_SPACE(most_descriptors * array.array("i").itemsize) if most_descriptors else 0
    head, ancillary, flags, _ = connection.recvmsg(_LENGTH.size, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = _descriptors(ancillary)
    try:
        return _frame(connection, head, flags), descriptors
    except BaseException:
        for fd in descriptors:
            os.close(fd)
        raise


def _frame(connection: socket.socket, head: bytes, flags: int) -> bytes:
    """The rest of a message whose first bytes are ``head``."""
    if flags & socket.MSG_CTRUNC:
        message = "more descriptors came with one message than it may have"
        raise WireError(message)
    head += _exactly(connection, _LENGTH.size - len(head))
    (size,) = _LENGTH.unpack(head)
    if size > MAX_MESSAGE_BYTES:
        message = f"a message of {size} bytes; the most is {MAX_MESSAGE_BYTES}"
        raise WireError(message)
    return _exactly(connection, size)


def receive_lease(connection: socket.socket) -> Lease:
    """The lease that a rank asks for; no descriptor may come with it."""
    frame, _ = receive_message(connection, 0)
    return _LEASE.decode([frame])


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user (or as root)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in {os.getuid(), 0}


def listen(path: Path) -> socket.socket:
    """A listening socket at a path that only this user may connect to; what an earlier vault left there is removed."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    server.bind(str(path))
    path.chmod(0o600)
    server.listen(128)
    return server


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()


def _exactly(connection: socket.socket, count: int) -> bytes:
    taken = bytearray()
    while len(taken) < count:
        part = connection.recv(min(count - len(taken), 1 << 20))
        if not part:
            message = "the other end closed the connection"
            raise EOFError(message)
        taken += part
    return bytes(taken)
