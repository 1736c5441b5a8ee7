"""A part of a card's multiprocessors for one process: a stream of a green context, through the driver's own functions.

What is launched on the stream keeps to the part; memory, graphs and libraries are the process's as ever. (A share by MPS's active
thread percentage does not do: within one, cuBLAS was seen to leave parts of its products unwritten.)
"""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

_SM: Final = 1
"""``CU_DEV_RESOURCE_TYPE_SM``."""

_DEFAULT_STREAM: Final = 1
"""``CU_GREEN_CTX_DEFAULT_STREAM``, the one flag that a green context must have."""

_NON_BLOCKING: Final = 1
_RESOURCE_BYTES: Final = 1024
"""More than ``CUdevResource`` has in any version; what is in it is the driver's business, but for the count."""

_COUNT_AT: Final = 96
"""Where ``CUdevResource`` holds its number of multiprocessors."""


class PartitionError(RuntimeError):
    """The driver makes no such part of the card."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stream, and the multiprocessors that its kernels may use."""

    stream: torch.cuda.Stream
    processors: int


def part_of(device: torch.device, percent: int, priority: int) -> Part:
    """A stream on this share of the card, rounded up to what the card can be divided into. Raises ``PartitionError``."""
    index = device.index or 0
    everything = torch.cuda.get_device_properties(index).multi_processor_count
    if percent >= 100:
        return Part(torch.cuda.Stream(device, priority), everything)  # type: ignore[no-untyped-call]  # torch leaves it so
    torch.cuda.synchronize(device)  # the process's own context must be there
    number = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(number), index)
    whole, part, rest = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(3))
    _call("cuDeviceGetDevResource", number, whole, _SM)
    groups = ctypes.c_uint(1)
    wanted = max(1, _count(whole) * percent // 100)
    _call("cuDevSmResourceSplitByCount", part, ctypes.byref(groups), whole, rest, 0, wanted)
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuDevResourceGenerateDesc", ctypes.byref(description), part, 1)
    _call("cuGreenCtxCreate", ctypes.byref(context), description, number, _DEFAULT_STREAM)
    _call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, priority)
    processors = _count(part)
    _tell_blas(processors)
    return Part(torch.cuda.ExternalStream(stream.value, device), processors)  # type: ignore[no-untyped-call]


def _count(resource: "ctypes.Array[ctypes.c_char]") -> int:
    return int.from_bytes(resource.raw[_COUNT_AT : _COUNT_AT + 4], "little")


def _tell_blas(processors: int) -> None:
    """CuBLAS makes as many blocks as the card has multiprocessors; more than the part has would come in a second wave."""
    version = torch.version.cuda
    assert version is not None, "a partition without CUDA"
    try:
        library = ctypes.CDLL(f"libcublas.so.{version.partition('.')[0]}")
    except OSError as error:
        logging.getLogger(__name__).warning("cuBLAS is not told that it has %d multiprocessors: %s", processors, error)
        return
    library.cublasSetSmCountTarget.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.cublasSetSmCountTarget(torch.cuda.current_blas_handle(), processors)  # type: ignore[no-untyped-call]


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuDeviceGet.argtypes = (pointer, ctypes.c_int)
    library.cuDeviceGetDevResource.argtypes = (ctypes.c_int, pointer, ctypes.c_int)
    library.cuDevSmResourceSplitByCount.argtypes = (pointer, pointer, pointer, pointer, number, number)
    library.cuDevResourceGenerateDesc.argtypes = (pointer, pointer, number)
    library.cuGreenCtxCreate.argtypes = (pointer, pointer, ctypes.c_int, number)
    library.cuGreenCtxStreamCreate.argtypes = (pointer, pointer, number, ctypes.c_int)
    return library


def _call(name: str, *arguments: object) -> None:
    try:
        code = getattr(_driver(), name)(*arguments)
    except (OSError, AttributeError) as error:
        message = f"a share of a card needs a driver with green contexts (CUDA 12.4 and later): {error}"
        raise PartitionError(message) from error
    if code:
        message = (
            f"{name}: the driver answers with error {code}; a share of a card needs a driver for CUDA 12.4 or later"
        )
        raise PartitionError(message)
