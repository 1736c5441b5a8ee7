"""Trained weights on disk, whichever format they are in: one narrow way to read a run of a named tensor.

Tensors have their Hugging Face names whatever the format. Only data formats are read: a pickle (``.bin``, ``.pt``) can run
code when it is opened, so it is refused.
"""

from pathlib import Path
from typing import Final, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from edgemesh.engine.gguf_checkpoint import GgufCheckpoint
from edgemesh.engine.layout import Run, source_shapes
from edgemesh.engine.shape import Dtype, ModelError, ModelShape, read_json, read_shape

PLAIN_DTYPES: Final = {"F64", "F32", "F16", "BF16"}
PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class _Slice(Protocol):
    """One tensor of an open safetensors file."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: slice | tuple[slice, slice]) -> torch.Tensor: ...


class _Handle(Protocol):
    """An open safetensors file, whose package does not type it."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...


class Checkpoint(Protocol):
    """Where weights come from."""

    shape: ModelShape

    def size(self, source: str) -> tuple[int, ...] | None:
        """The shape of a tensor, or ``None`` if there is none of that name."""

    def read(self, run: Run) -> torch.Tensor:
        """The rows or columns of a run, in a plain floating type. Raises ``ModelError``."""

    def where(self, source: str) -> str:
        """The file of a tensor, for messages."""

    def close(self) -> None:
        """Let go of the files."""


def open_checkpoint(path: Path, dtype: Dtype = "float32") -> Checkpoint:
    """The weights at a path (a directory with safetensors, or a GGUF file), each tensor checked for presence and shape."""
    if path.suffix == ".gguf":
        checkpoint: Checkpoint = GgufCheckpoint(path, dtype)
    elif path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        has_safetensors = next(path.glob("*.safetensors"), None) is not None
        checkpoint = GgufCheckpoint(_only(ggufs), dtype) if ggufs and not has_safetensors else Safetensors(path, dtype)
    else:
        message = f"{path}: is neither a model directory nor a .gguf file"
        raise ModelError(message)
    for source, expected in source_shapes(checkpoint.shape).items():
        found = checkpoint.size(source)
        if found != expected:
            what = "is missing" if found is None else f"has shape {list(found)}"
            message = f"{checkpoint.where(source)}: tensor {source}: {what}; the config asks for {list(expected)}"
            checkpoint.close()
            raise ModelError(message)
    return checkpoint


def _only(ggufs: list[Path]) -> Path:
    if len(ggufs) > 1:
        message = (
            f"{ggufs[0].parent}: holds {len(ggufs)} GGUF files; name one: {', '.join(each.name for each in ggufs)}"
        )
        raise ModelError(message)
    return ggufs[0]


class Safetensors:
    """A Hugging Face directory: ``config.json`` and one or several safetensors files."""

    def __init__(self, path: Path, dtype: Dtype) -> None:
        self.path = path
        self.shape = read_shape(path / "config.json", dtype)
        self._handles = {file: _open(path / file) for file in sorted(self._files())}
        self._holder = {
            tensor: file
            for file, handle in self._handles.items()
            for tensor in handle.keys()  # noqa: SIM118 - a safetensors handle is no mapping
        }

    def size(self, source: str) -> tuple[int, ...] | None:
        """The shape of a tensor."""
        file = self._holder.get(source)
        return None if file is None else tuple(self._handles[file].get_slice(source).get_shape())

    def read(self, run: Run) -> torch.Tensor:
        """The rows or columns of a run, copied from the mapped file."""
        where = self.where(run.source)
        part = self._handles[self._holder[run.source]].get_slice(run.source)
        if (kind := part.get_dtype()) not in PLAIN_DTYPES:
            message = (
                f"{where}: tensor {run.source}: type {kind} is not served; allowed: {', '.join(sorted(PLAIN_DTYPES))}"
            )
            raise ModelError(message)
        stop = run.start + run.count
        try:
            tensor = part[run.start : stop] if run.axis == 0 else part[:, run.start : stop]
        except (SafetensorError, OSError, RuntimeError) as error:
            message = f"{where}: tensor {run.source}: cannot be read: {error}"
            raise ModelError(message) from error
        return tensor

    def where(self, source: str) -> str:
        """The file of a tensor."""
        return str(self.path / self._holder.get(source, ""))

    def close(self) -> None:
        """Let go of the files."""
        self._handles.clear()

    def _files(self) -> set[str]:
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            return _indexed(index)
        single = sorted(file.name for file in self.path.glob("*.safetensors"))
        if len(single) == 1:
            return set(single)
        if single:
            message = f"{self.path}: holds {len(single)} safetensors files but no {index.name}"
            raise ModelError(message)
        pickles = [file.name for kind in PICKLES for file in self.path.glob(kind)]
        if pickles:
            message = (
                f"{self.path}: holds only pickles ({', '.join(sorted(pickles)[:3])}), which can run code when they are "
                "opened and are never read; convert the model to safetensors"
            )
            raise ModelError(message)
        message = f"{self.path}: holds no .safetensors and no .gguf file"
        raise ModelError(message)


def _indexed(index: Path) -> set[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        message = f"{index}: weight_map: is missing or empty"
        raise ModelError(message)
    files = set(weight_map.values())
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            message = f"{index}: weight_map: {file!r} is not the name of a safetensors file in this directory"
            raise ModelError(message)
    return files


def _open(path: Path) -> _Handle:
    try:
        return cast("_Handle", safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        message = f"{path}: is no complete safetensors file: {error}"
        raise ModelError(message) from error
