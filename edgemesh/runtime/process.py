"""Processes that cannot outlive their supervisor, and whose exits and stops are seen at once."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
RUN_MARK: Final = "EDGEMESH_RUN_DIR"
"""In the environment of every process of a run, and of what those start: by it the reaper finds them."""

ORPHANED: Final = 71
"""Exit code of a child that finds its parent gone."""


@dataclass(frozen=True, slots=True)
class Exited:
    """A child is over: ``code`` is its exit status, or minus the signal that killed it."""

    code: int

    def __str__(self) -> str:
        if self.code < 0:
            return f"was killed by {signal_name(-self.code)}"
        return f"exited with code {self.code}"


@dataclass(frozen=True, slots=True)
class Stopped:
    """A child was stopped by a signal; it may be continued."""

    signal: int

    def __str__(self) -> str:
        return f"stopped by {signal_name(self.signal)}"


@dataclass(frozen=True, slots=True)
class Continued:
    """A stopped child runs again."""


Change = Exited | Stopped | Continued


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that spawned it ends; exit at once if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(ORPHANED)


def name_process(name: str) -> None:
    """What ``ps`` and ``top`` call this thread; at most 15 bytes are kept."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    inherit: Sequence[int] = (),
    session: bool = False,
) -> int:
    """Start ``python -m module`` in a process group (or session) of its own; returns its pid.

    Call it from the main thread: the death signal follows the thread that spawned. Output goes to ``log``, input is
    empty, and of the open descriptors only ``inherit`` are passed on, under their own numbers.
    """
    command = [sys.executable, "-m", "edgemesh.runtime.child", str(os.getpid()), module, *arguments]
    if session:
        command = [sys.executable, "-m", module, *arguments]
    actions: list[tuple[object, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    # A session leader leads its process group already.
    own: dict[str, Any] = {"setsid": True} if session else {"setpgroup": 0}
    for descriptor in inherit:
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - positional only
    try:
        return os.posix_spawn(
            sys.executable,
            command,
            dict(environment if environment is not None else os.environ),
            file_actions=actions,
            setsigmask=(),
            setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD),
            **own,
        )
    finally:
        for descriptor in inherit:
            os.set_inheritable(descriptor, False)  # noqa: FBT003 - positional only


def changes(pid: int) -> list[Change]:
    """What happened to a child since the last look; an exit reaps it and is the last."""
    seen: list[Change] = []
    while True:
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:
            return seen
        if found is None:
            return seen
        if found.si_code == os.CLD_STOPPED:
            seen.append(Stopped(found.si_status))
        elif found.si_code == os.CLD_CONTINUED:
            seen.append(Continued())
        elif found.si_code != os.CLD_TRAPPED:
            seen.append(Exited(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status))
            return seen


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a child and whatever it started in its process group; one that is gone is fine."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


class Killed:
    """Children that were killed and may not be gone yet: giving gigabytes back takes a while, and no loop waits for that."""

    def __init__(self) -> None:
        self._pids: list[int] = []

    def add(self, pid: int) -> None:
        """Kill a child and whatever it started."""
        kill_group(pid)
        self._pids.append(pid)

    def reap(self) -> None:
        """Forget those that are gone."""
        self._pids = [pid for pid in self._pids if not os.waitpid(pid, os.WNOHANG)[0]]

    def wait(self) -> None:
        """Wait until all are gone."""
        while self._pids:
            os.waitpid(self._pids.pop(), 0)
