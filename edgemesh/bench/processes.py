"""What processes cost, read from /proc: who they are, processor time, resident memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from msgspec import Struct

PROC: Final = Path("/proc")
TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class Memory(Struct, frozen=True):
    """Bytes resident: all of them, with what is shared divided among those who share it, and the most there ever were."""

    rss: int
    pss: int
    peak: int


def environment_of(pid: int) -> dict[str, str]:
    """A process's environment; empty for one that is gone or not ours."""
    try:
        text = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in text.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def words_of(pid: int) -> list[str]:
    """A process's command line; empty for one that is gone."""
    try:
        return [word.decode(errors="replace") for word in (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")]
    except OSError:
        return []


def marked(name: str, value: str) -> list[int]:
    """The live processes whose environment has ``name=value``, parents or not; zombies are not live."""
    pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if environment_of(pid).get(name) == value and state_of(pid) not in {"Z", ""}]


def state_of(pid: int) -> str:
    """``R``, ``S``, ``T``, ``Z`` and so on; empty for a process that is gone."""
    return (_stat(pid) or [""])[0]


def cpu_ns(pid: int) -> int:
    """Processor time so far, user and system, all threads; 0 for a process that is gone. Counts in ticks of 10 ms."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) * TICK_NS if fields else 0


def memory_of(pid: int) -> Memory:
    """Resident memory. Raises ``OSError`` for a process that is gone or not ours."""
    found = dict.fromkeys(("Rss", "Pss"), 0)
    for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) * 1024
    status = (PROC / str(pid) / "status").read_text().partition("VmHWM:")[2]
    return Memory(found["Rss"], found["Pss"], int(status.split()[0]) * 1024)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; a name may hold blanks and brackets, so count from its end."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
