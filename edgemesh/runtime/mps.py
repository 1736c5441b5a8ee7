"""The control daemon of NVIDIA's Multi-Process Service: found, started, asked and ended."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CONTROL: Final = "nvidia-cuda-mps-control"
SERVER: Final = "nvidia-cuda-mps-server"
DEFAULT_PIPE: Final = "/tmp/nvidia-mps"  # noqa: S108 - the daemon's own default
PIPE_KEY: Final = "CUDA_MPS_PIPE_DIRECTORY"
LOG_KEY: Final = "CUDA_MPS_LOG_DIRECTORY"
PERCENT_KEY: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


PIPE_DIR: Final = "mps"
LOG_DIR: Final = "mps-log"
MAX_TOOL_BYTES: Final = 64 << 20
_VERSION: Final = re.compile(rb"(?<![\d.])\d{3}\.\d{2,3}\.\d{2}(?![\d.])")

ANSWER_S: Final = 10.0
"""How long the daemon may take to start, and to answer."""


@dataclass(frozen=True, slots=True)
class Mps:
    """A daemon: where it listens, and whether this run started it."""

    pipe: Path
    ours: bool


@dataclass(frozen=True, slots=True)
class Absent:
    """No daemon, and why."""

    reason: str


def running(environment: Mapping[str, str]) -> Path | None:
    """The pipe directory of a daemon that this user runs already, and that answers."""
    pipe = Path(environment.get(PIPE_KEY) or DEFAULT_PIPE)
    try:
        control = (pipe / "control").stat()
    except OSError:
        return None
    if control.st_uid != os.getuid():
        return None
    return pipe if command("get_server_list", pipe, environment) is not None else None


def start(run_dir: Path, environment: Mapping[str, str]) -> Mps | Absent:
    """Start a daemon in the run's directory."""
    if absent := absence(environment.get("PATH")):
        return absent
    tool = shutil.which(CONTROL, path=environment.get("PATH"))
    assert tool is not None
    pipe, log = run_dir / PIPE_DIR, run_dir / LOG_DIR
    for directory in (pipe, log):
        directory.mkdir(mode=0o700)
    own = daemon_environment(environment, pipe, log)
    # A file, since a pipe would stay open for as long as the daemon lives.
    said = log / "start.log"
    try:
        with said.open("wb") as output:
            done = subprocess.run(  # noqa: S603 - the driver's tool, found on the path, with fixed arguments
                [tool, "-d"],
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=ANSWER_S,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Absent(f"{tool} cannot be started: {error}")
    if done.returncode:
        words = said.read_text(encoding="utf-8", errors="replace").strip()[-300:]
        return Absent(f"{tool} -d exited with code {done.returncode}: {words or 'it said nothing'}")
    end = time.monotonic() + ANSWER_S
    while command("get_server_list", pipe, environment) is None:
        if time.monotonic() > end:
            return Absent(f"the daemon at {pipe} does not answer: {last_words(log)}")
        time.sleep(0.02)
    return Mps(pipe, ours=True)


def driver_version(kernel: Path = Path("/sys/module/nvidia/version")) -> str:
    """The version of the driver that the kernel has loaded; "" if it does not say."""
    try:
        return kernel.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def absence(path: str | None) -> Absent | None:
    """Why the tools on a search path cannot serve the driver that is loaded; ``None`` if nothing is known against them."""
    found = [shutil.which(name, path=path) for name in (CONTROL, SERVER)]
    tools = [Path(each) for each in found if each is not None]
    if len(tools) < len(found):
        return Absent(f"{CONTROL} or {SERVER} is not on the PATH")
    mismatch = mismatched(tools, driver_version())
    return Absent(mismatch) if mismatch else None


def mismatched(tools: Sequence[Path], driver: str) -> str:
    """Why these tools cannot serve this driver, or nothing: they speak to the driver of their own version only.

    The version stands in the programs; if none of them names one, they are given the benefit of the doubt.
    """
    if not driver:
        return ""
    named = {
        found.decode()
        for tool in tools
        if tool.stat().st_size <= MAX_TOOL_BYTES
        for found in _VERSION.findall(tool.read_bytes())
    }
    if not named or driver in named:
        return ""
    return (
        f"{tools[0]} is of driver {', '.join(sorted(named))}, and the kernel's is {driver}: install matching MPS tools"
    )


def command(text: str, pipe: Path, environment: Mapping[str, str]) -> str | None:
    """What the daemon at ``pipe`` answers; ``None`` if it does not."""
    tool = shutil.which(CONTROL, path=environment.get("PATH"))
    if tool is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - the driver's tool, found on the path, with fixed arguments
            [tool],
            env=dict(environment) | {PIPE_KEY: str(pipe)},
            input=f"{text}\n",
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def stop(run_dir: Path, environment: Mapping[str, str]) -> None:
    """End this run's daemon and its servers, if it has one."""
    pipe = run_dir / PIPE_DIR
    if (pipe / "control").exists():
        command("quit -t 1", pipe, environment)


def daemon_environment(environment: Mapping[str, str], pipe: Path, log: Path) -> dict[str, str]:
    """What the daemon sees: every card of the machine, since its clients number them for themselves."""
    own = dict(environment) | {PIPE_KEY: str(pipe), LOG_KEY: str(log)}
    for key in ("CUDA_VISIBLE_DEVICES", PERCENT_KEY):
        own.pop(key, None)
    return own


def last_words(log: Path) -> str:
    """The last line of the daemon's logs."""
    for name in ("server.log", "control.log"):
        try:
            lines = (log / name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            continue
        if lines:
            return lines[-1][:300]
    return "it wrote no log"
