"""From what a user calls a model to a directory with everything that serving needs; torch is not imported here.

A name is a pulled model (``smollm2-135m``), a Hugging Face directory, a hub id that has been pulled, or a GGUF file. A
GGUF holds its config and tokenizer inside: both are written out once, beside it, so that the gateway reads every model alike.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgemesh.engine.gguf_config import config_of
from edgemesh.engine.gguf_file import GgufFile
from edgemesh.engine.gguf_tokenizer import tokenizer_files
from edgemesh.engine.shape import ModelError

CATALOGUE: Final = {"smollm2-135m": "SmolLM2-135M-Instruct, 4-bit, 92 MiB"}
"""Models that ``pull`` knows by a name of its own, and what they are."""

HUB_PATTERNS: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "LICENSE*")
"""What is fetched of a hub repository: never pickles or code."""

_HUB_ID: Final = re.compile(r"\A[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}\Z", re.ASCII)
_WRITTEN: Final = ("tokenizer.json", "tokenizer_config.json", "config.json")


def models_dir() -> Path:
    """Where pulled models live."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The base directory specification: a relative path there is to be ignored.
    base = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "edgemesh" / "models"


def is_hub_id(name: str) -> bool:
    """Whether a name has the form ``owner/model``."""
    return _HUB_ID.match(name) is not None and ".." not in name


def to_be_pulled(name: str) -> bool:
    """Whether ``pull`` knows the name, and what it names is not here."""
    if name not in CATALOGUE and not is_hub_id(name):
        return False
    if Path(name).exists():
        return False
    if name in CATALOGUE:
        return not (models_dir() / name).is_dir()
    try:
        _snapshot(name)
    except ModelError:
        return True
    return False


def locate(name: str) -> Path:
    """The directory of a model: weights, ``config.json``, and (if the model has one) ``tokenizer.json``.

    Nothing is downloaded. Raises ``ModelError`` that says what to do.
    """
    try:
        path = Path(name).expanduser()
        if path.exists():
            return _beside(path.resolve())
        if name in CATALOGUE and (models_dir() / name).is_dir():
            return _beside(models_dir() / name)
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # no space, no permission, no such home, no possible path
        message = f"model {name!r}: {error}"
        raise ModelError(message) from error
    if name in CATALOGUE:
        message = f"model {name!r} is not here yet; run: edgemesh pull {name}"
        raise ModelError(message)
    if is_hub_id(name):
        return _snapshot(name)
    message = (
        f"model {name!r} is neither a directory, a GGUF file nor a hub id (owner/model); "
        f"models to pull by name: {', '.join(CATALOGUE)}"
    )
    raise ModelError(message)


def _beside(path: Path) -> Path:
    """The directory that serves a path; a GGUF's config and tokenizer are written if they are not there."""
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs and next(path.glob("*.safetensors"), None) is None:
            return _with_files(path, ggufs)
        if not (path / "config.json").is_file():
            message = f"{path}: holds neither config.json nor a .gguf file"
            raise ModelError(message)
        return path
    if path.suffix != ".gguf":
        message = f"{path}: is neither a directory nor a .gguf file"
        raise ModelError(message)
    alone = len(list(path.parent.glob("*.gguf"))) == 1 and next(path.parent.glob("*.safetensors"), None) is None
    return _with_files(path.parent, [path]) if alone and os.access(path.parent, os.W_OK) else _apart(path)


def _with_files(directory: Path, ggufs: list[Path]) -> Path:
    if len(ggufs) > 1:
        names = ", ".join(each.name for each in ggufs)
        message = f"{directory}: holds {len(ggufs)} GGUF files; name one of them: {names}"
        raise ModelError(message)
    if any(not (directory / name).exists() for name in _WRITTEN):
        if not os.access(directory, os.W_OK):
            return _apart(ggufs[0])
        write_files(ggufs[0], directory)
    return directory


def _apart(gguf: Path) -> Path:
    """A directory of a GGUF's own in the cache, where nothing can be written beside it or other models lie there too."""
    about = gguf.stat()
    mark = hashlib.sha256(f"{gguf}\0{about.st_size}\0{about.st_mtime_ns}".encode()).hexdigest()[:16]
    directory = models_dir() / f"{gguf.stem}-{mark}"
    if not directory.is_dir():
        with staged(directory) as fresh:
            (fresh / gguf.name).symlink_to(gguf)
            write_files(gguf, fresh)
    return directory


def write_files(gguf: Path, directory: Path) -> None:
    """Write a GGUF's config and tokenizer into a directory; what is there already stays, being the user's."""
    with GgufFile(gguf) as file:
        wanted = {name for name in _WRITTEN if not (directory / name).exists()}
        files = {"config.json": json.dumps(config_of(file), indent=2).encode()}
        if wanted - {"config.json"}:
            files |= tokenizer_files(file)
    for name in _WRITTEN:
        if name in wanted:
            _write(directory / name, files[name])


def _write(path: Path, data: bytes) -> None:
    """All or nothing, also when two do it at once."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """A fresh directory that takes its final name once it is whole; if another was quicker, the other's stays."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        yield fresh
        fresh.chmod(0o755)
        try:
            fresh.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _snapshot(name: str) -> Path:
    """The files of a hub model that has been pulled."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - half a second that other models need not wait
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=list(HUB_PATTERNS)))
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        message = f"model {name!r} is no directory here, and has not been pulled; run: edgemesh pull {name}"
        raise ModelError(message) from error
