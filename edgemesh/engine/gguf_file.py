"""The header of a GGUF file: its metadata and where each tensor lies, read without torch and bounded at every size.

The format is llama.cpp's ``docs/gguf.md``. Only little-endian versions 2 and 3 are read. Nothing but slices of one
read-only mapping is made; a truncated or lying file ends in ``ModelError`` that names it.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, Final, Self

import msgspec
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from edgemesh.engine.shape import ModelError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_ENTRIES: Final = 1 << 20
MAX_ITEMS: Final = 1 << 24
MAX_DEPTH: Final = 2

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor: its shape as torch has it (rows first), its GGML type, and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; quantisation blocks never cross rows."""
        return self.nbytes // (self.shape[0] if len(self.shape) > 1 else 1)


class GgufFile:
    """A GGUF file's metadata and tensor table over a read-only mapping."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            message = f"{path}: cannot be mapped: {error}"
            raise ModelError(message) from error
        try:
            self.metadata, self.tensors = _Header(self.data).read()
        except (ValueError, struct.error, UnicodeDecodeError, OverflowError) as error:
            self.data.close()
            message = f"{path}: is no complete GGUF file: {error}"
            raise ModelError(message) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.data.close()


class _Header:
    """A cursor over the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.take(4) != MAGIC:
            message = f"it begins with {self.data[:4]!r}, not {MAGIC!r}"
            raise ValueError(message)
        if (version := self.number("I")) not in VERSIONS:
            message = f"version {version}; read are {VERSIONS}"
            raise ValueError(message)
        tensors, entries = self.number("Q"), self.number("Q")
        if max(tensors, entries) > MAX_ENTRIES:
            message = f"{tensors} tensors and {entries} metadata entries; the most is {MAX_ENTRIES}"
            raise ValueError(message)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self.string()
            metadata[key] = self.value(self.number("I"))
        return metadata, self.table(tensors, metadata)

    def table(self, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        infos = []
        for _ in range(count):
            name = self.string()
            dims = self.number("I")
            if not 1 <= dims <= 4:
                message = f"tensor {name}: {dims} dimensions; allowed are 1 to 4"
                raise ValueError(message)
            shape = tuple(reversed([self.number("Q") for _ in range(dims)]))
            infos.append((name, shape, self.number("I"), self.number("Q")))
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= 1 << 20:
            message = f"general.alignment: {align!r} is not from 1 to {1 << 20}"
            raise ValueError(message)
        base = -(-self.at // align) * align
        return {name: self.tensor(name, shape, kind, base + offset) for name, shape, kind, offset in infos}

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorInfo:
        try:
            ggml = GGMLQuantizationType(kind)
        except ValueError:
            message = f"tensor {name}: type {kind} is not known"
            raise ValueError(message) from None
        block, block_bytes = GGML_QUANT_SIZES[ggml]
        elements = 1
        for size in shape:
            elements *= size
        if elements == 0 or shape[-1] % block:
            message = f"tensor {name}: shape {shape} is no whole number of {ggml.name} blocks of {block}"
            raise ValueError(message)
        nbytes = elements // block * block_bytes
        if start + nbytes > len(self.data):
            message = f"tensor {name}: ends at byte {start + nbytes}, the file at {len(self.data)}"
            raise ValueError(message)
        return TensorInfo(name, shape, ggml, start, nbytes)

    def value(self, kind: int, depth: int = 0) -> Any:  # noqa: ANN401 - metadata is of any JSON-like type
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= MAX_DEPTH:
            message = f"metadata type {kind} at byte {self.at} is not known here"
            raise ValueError(message)
        item, count = self.number("I"), self.number("Q")
        if count > MAX_ITEMS:
            message = f"an array of {count} items at byte {self.at}; the most is {MAX_ITEMS}"
            raise ValueError(message)
        if item in _SCALARS:
            code = f"<{count}{_SCALARS[item]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code))))
        return [self.value(item, depth + 1) for _ in range(count)]

    def string(self) -> str:
        return str(self.take(self.number("Q")), "utf-8")

    def number(self, code: str) -> Any:  # noqa: ANN401 - the code says which
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            message = f"{count} bytes are needed at byte {self.at}, the file ends at {len(self.data)}"
            raise ValueError(message)
        taken = self.data[self.at : self.at + count]
        self.at += count
        return taken
