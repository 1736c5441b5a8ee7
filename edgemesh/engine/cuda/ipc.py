"""CUDA memory that processes share: allocated by one, opened by others through the driver's own handles.

The runtime library is the one that torch has loaded, called through ctypes. Each allocation is a plain ``cudaMalloc`` of its
own, of whole blocks of the driver's: a handle opens the block that an allocation lies in, so a small one would give its neighbours away.
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Self

import torch

from edgemesh.engine.cuda.devices import check_allocator, uuid_of
from edgemesh.engine.memory import MemoryFault, fitting, tensors
from edgemesh.wire.messages import Grant

HANDLE_BYTES: Final = 64
BLOCK_BYTES: Final = 2 << 20
"""The driver's own granule of device memory."""

_LAZY_PEER_ACCESS: Final = 1
"""``cudaIpcMemLazyEnablePeerAccess``, the only flag there is."""


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def _runtime() -> ctypes.CDLL:
    version = torch.version.cuda
    if version is None:
        message = f"torch {torch.__version__} was built without CUDA"
        raise MemoryFault(message)
    # torch has loaded this very library.
    library = ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}")
    library.cudaGetErrorString.restype = ctypes.c_char_p
    pointer = ctypes.c_void_p
    library.cudaMalloc.argtypes = (ctypes.POINTER(pointer), ctypes.c_size_t)
    library.cudaFree.argtypes = (pointer,)
    library.cudaIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), pointer)
    library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(pointer), _Handle, ctypes.c_uint)
    library.cudaIpcCloseMemHandle.argtypes = (pointer,)
    return library


def _call(name: str, *arguments: Any) -> None:  # noqa: ANN401 - whatever the C function takes
    """Call a function of the runtime. Raises ``MemoryFault`` with its own words."""
    library = _runtime()
    code = getattr(library, name)(*arguments)
    if code:
        reason = library.cudaGetErrorString(code).decode()
        library.cudaGetLastError()  # or the next call of torch would report it again
        message = f"{name}: {reason} (error {code})"
        raise MemoryFault(message)


class DeviceRegion:
    """One allocation on a card, this process's own or another's."""

    def __init__(self, pointer: int, nbytes: int, device: int, *, owned: bool) -> None:
        self.nbytes = nbytes
        self.device = device
        self._pointer = pointer
        self._owned = owned
        self._bytes: torch.Tensor | None = None

    @classmethod
    def create(cls, name: str, nbytes: int, device: int) -> Self:
        """Memory of undefined contents. Raises ``MemoryFault`` if the card has not so much."""
        pointer = ctypes.c_void_p()
        size = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        with torch.cuda.device(device):
            free, total = torch.cuda.mem_get_info(device)
            try:
                _call("cudaMalloc", ctypes.byref(pointer), size)
            except MemoryFault as error:
                message = f"GPU {device}: {name} needs {size >> 20} MiB, and {free >> 20} of {total >> 20} MiB are free: {error}"
                raise MemoryFault(message) from error
        assert pointer.value is not None
        return cls(pointer.value, nbytes, device, owned=True)

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: int) -> Self:
        """Another process's memory; it must go on living there."""
        if len(handle) != HANDLE_BYTES:
            message = f"a handle of {len(handle)} bytes; CUDA's have {HANDLE_BYTES}"
            raise MemoryFault(message)
        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            value = _Handle.from_buffer_copy(handle)
            _call("cudaIpcOpenMemHandle", ctypes.byref(pointer), value, _LAZY_PEER_ACCESS)
        assert pointer.value is not None
        return cls(pointer.value, nbytes, device, owned=False)

    def handle(self) -> bytes:
        """What another process opens this memory by."""
        handle = _Handle()
        with torch.cuda.device(self.device):
            _call("cudaIpcGetMemHandle", ctypes.byref(handle), self._pointer)
        return bytes(handle)

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A view of the bytes from ``offset``; the region must outlive it. ``MemoryFault`` if it would not fit."""
        if self._bytes is None:
            self._bytes = torch.as_tensor(_Bytes(self._pointer, self.nbytes), device=f"cuda:{self.device}")
        end = offset + fitting(offset, dtype, shape, self.nbytes) * dtype.itemsize
        return self._bytes[offset:end].view(dtype).view(tuple(shape))

    def close(self) -> None:
        """Give the memory back, or stop mapping it; no view may be used afterwards."""
        self._bytes = None
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            _call("cudaFree" if self._owned else "cudaIpcCloseMemHandle", self._pointer)


class _Bytes:
    """Device memory as torch takes it without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def opened(grant: Grant, environment: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Every tensor of a grant on a card; the process uses that card, and maps the memory, from now on.

    Raises ``MemoryFault`` where the vault and this process would not mean the same memory by it.
    """
    card = grant.card
    assert card is not None
    check_allocator(environment)
    if card.torch != torch.__version__:
        message = (
            f"the vault runs torch {card.torch} and this rank {torch.__version__}: start both from one environment"
        )
        raise MemoryFault(message)
    if len(card.handles) != len(grant.region_bytes):
        message = f"{len(grant.region_bytes)} regions were granted, {len(card.handles)} handles came"
        raise MemoryFault(message)
    if not torch.cuda.is_available() or card.device >= torch.cuda.device_count():
        message = f"the vault granted memory of GPU {card.device}, and this rank sees {torch.cuda.device_count()} GPUs"
        raise MemoryFault(message)
    torch.cuda.set_device(card.device)
    if (here := uuid_of(card.device)) != card.uuid:
        message = (
            f"GPU {card.device} is {card.uuid} for the vault and {here} for this rank: "
            "CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER must be the same for both"
        )
        raise MemoryFault(message)
    granted = zip(card.handles, grant.region_bytes, strict=True)
    return tensors(grant.tensors, [DeviceRegion.open(handle, nbytes, card.device) for handle, nbytes in granted])
