"""Memory that processes share: anonymous files (memfd) mapped as tensors without a copy.

A memfd has no name, so there is nothing to unlink and no limit of /dev/shm; it lives as long as a process maps it or holds
its descriptor. Its size is sealed, so that no process can cut a peer's mapping short; weights are sealed against writing
too, and mapped read-only: a stray write ends the writer instead of corrupting its peers.
"""

import fcntl
import mmap
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, Self

import torch

from edgemesh.engine.weights import DTYPES
from edgemesh.wire.messages import TensorPlace

ALIGN_BYTES: Final = 64
"""Tensors begin at multiples of a cache line, which vectorised kernels like."""

MAX_REGION_BYTES: Final = 1 << 42

_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MemoryFault(Exception):  # noqa: N818 - it names what happened
    """Shared memory that is not what it was said to be."""


class Memory(Protocol):
    """Bytes that tensors can be laid over."""

    nbytes: int

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A view of the bytes from ``offset``. Raises ``MemoryFault`` if it would not fit."""


class Region:
    """One memfd, mapped here or not."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls, name: str, nbytes: int) -> Self:
        """A region of zeros, of which memory is taken only where it is touched."""
        if not 1 <= nbytes <= MAX_REGION_BYTES:
            message = f"region {name}: {nbytes} bytes; allowed are 1 to {MAX_REGION_BYTES}"
            raise MemoryFault(message)
        fd = os.memfd_create(f"edgemesh-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        except OSError:
            os.close(fd)
            raise
        return cls(fd, nbytes)

    @classmethod
    def adopt(cls, fd: int, nbytes: int) -> Self:
        """A region that another process made; ``MemoryFault`` unless its size is the stated one and sealed."""
        size = os.fstat(fd).st_size
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            message = f"descriptor {fd} is no memfd"
            raise MemoryFault(message) from error
        if size != nbytes or seals & _SIZE_SEALS != _SIZE_SEALS:
            message = f"descriptor {fd} has {size} bytes and seals {seals:#x}; {nbytes} sealed bytes were granted"
            raise MemoryFault(message)
        return cls(fd, nbytes)

    @property
    def writable(self) -> bool:
        """Whether it is not sealed against writing."""
        return not fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE

    def seal(self) -> None:
        """Drop this process's mapping and forbid writing for ever; ``MemoryFault`` if someone still maps it to write."""
        self._map = None  # not closed: tensors hold a reference to the mapping, and must not be left dangling
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        except OSError as error:
            message = f"a region of {self.nbytes} bytes is still mapped for writing"
            raise MemoryFault(message) from error

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A view of the bytes from ``offset``; it keeps the mapping alive. ``MemoryFault`` if it would not fit."""
        count = fitting(offset, dtype, shape, self.nbytes)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        with warnings.catch_warnings():
            # torch warns that it cannot protect read-only memory from its own writes; the kernel does.
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.frombuffer(self._mapping(), dtype=dtype, count=count, offset=offset)
        return flat.view(tuple(shape))

    def close(self) -> None:
        """Let go of the descriptor; tensors stay valid, since they hold the mapping."""
        self._map = None
        os.close(self.fd)

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
            self._map = mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED, access)
        return self._map


class Packing:
    """Offsets of tensors laid one after the other in a region."""

    def __init__(self, align: int = ALIGN_BYTES) -> None:
        self.places: dict[str, tuple[int, tuple[int, ...], str]] = {}
        self.nbytes = 0
        self._align = align

    def add(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Give a tensor its place."""
        count = DTYPES[dtype].itemsize
        for size in shape:
            count *= size
        self.places[name] = (self.nbytes, shape, dtype)
        self.nbytes = -(-(self.nbytes + count) // self._align) * self._align

    def alias(self, name: str, same_as: str) -> None:
        """Give a tensor the place of another."""
        self.places[name] = self.places[same_as]

    def on_wire(self, region: int) -> tuple[TensorPlace, ...]:
        """The places as a grant states them."""
        return tuple(
            TensorPlace(name=name, dtype=dtype, shape=shape, region=region, offset=offset)
            for name, (offset, shape, dtype) in self.places.items()
        )


def tensors(places: Sequence[TensorPlace], regions: Mapping[int, Memory] | Sequence[Memory]) -> dict[str, torch.Tensor]:
    """Every granted tensor over its region."""
    found: dict[str, torch.Tensor] = {}
    for place in places:
        if place.dtype not in DTYPES:
            message = f"tensor {place.name}: dtype {place.dtype!r}; allowed: {', '.join(DTYPES)}"
            raise MemoryFault(message)
        try:
            region = regions[place.region]
        except LookupError as error:
            message = f"tensor {place.name}: region {place.region} was not granted"
            raise MemoryFault(message) from error
        found[place.name] = region.tensor(place.offset, DTYPES[place.dtype], place.shape)
    return found


def fitting(offset: int, dtype: torch.dtype, shape: Sequence[int], nbytes: int) -> int:
    """The elements of a tensor at a byte of a region. Raises ``MemoryFault`` if it would not fit."""
    count = 1
    for size in shape:
        count *= size
    if offset < 0 or offset % dtype.itemsize or offset + count * dtype.itemsize > nbytes:
        message = f"a tensor {list(shape)} of {dtype} at byte {offset} does not fit a region of {nbytes} bytes"
        raise MemoryFault(message)
    return count
