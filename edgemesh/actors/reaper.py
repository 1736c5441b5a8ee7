"""Cleans up after a supervisor, however it ended.

A tiny process in a session of its own that holds a pipe from the supervisor. When the pipe ends, because the supervisor
closed it or died, every process that was started for the run is killed and the run directory removed.
"""

import argparse
import contextlib
import os
import select
import shutil
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Final

from edgemesh.runtime.mps import stop
from edgemesh.runtime.process import RUN_MARK

MPS_NAME: Final = "nvidia-cuda-mps"
"""How the kernel, which keeps 15 bytes, names the daemon and its servers."""

WAIT_S: Final = 5.0
"""How long to wait for killed processes to be gone before their directory is removed all the same."""


def main() -> None:
    """``python -m edgemesh.actors.reaper --run-dir DIR --pipe FD``."""
    parser = argparse.ArgumentParser(description="Cleans up after a supervisor; the supervisor starts it.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--pipe", type=int, required=True)
    found = parser.parse_args(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    reap(found.pipe, found.run_dir)


def reap(pipe: int, run_dir: Path) -> None:
    """Wait for the pipe's end, then leave nothing behind."""
    while os.read(pipe, 4096):
        pass
    end = time.monotonic() + WAIT_S
    # Its clients first: a server that goes before them leaves them hanging in the driver.
    kill_all(run_dir, end, spare=MPS_NAME)
    stop(run_dir, os.environ)
    kill_all(run_dir, end)
    remove(run_dir)


def kill_all(run_dir: Path, end: float, spare: str = "") -> None:
    """Kill what the run started, again until nothing is left or time is up."""
    while (left := kill_run(run_dir, spare)) and time.monotonic() < end:
        for descriptor in left:
            select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
            os.close(descriptor)


def kill_run(run_dir: Path, spare: str = "") -> list[int]:
    """Kill every process that carries the run's mark, whoever started it; their descriptors, readable once they end.

    Those whose name begins with ``spare`` are left.
    """
    mark = f"{RUN_MARK}={run_dir}".encode()
    killed = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        # A descriptor, unlike a number, cannot come to mean another process between the look and the kill.
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(int(process.name))
            try:
                marked = mark in (process / "environ").read_bytes().split(b"\0")
                spared = spare and (process / "comm").read_text(errors="replace").startswith(spare)
                if marked and not spared:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    killed.append(descriptor)
            finally:
                if descriptor not in killed:
                    os.close(descriptor)
    return killed


def remove(run_dir: Path) -> None:
    """Remove a run directory, if it is one and ours."""
    try:
        found = run_dir.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and run_dir.name.startswith("em-"):
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
