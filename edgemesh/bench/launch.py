"""A mesh started as a user would start it, by `edgemesh start`, in directories of its own, and looked at from outside."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from edgemesh.bench.processes import marked, words_of

MARK: Final = "EDGEMESH_LAUNCH"
"""An environment variable that every process of a mesh inherits, whoever its parent is."""

COMMAND: Final = (sys.executable, "-m", "edgemesh.cli.main")
"""The program, also where pip made no command of it."""

POLL_S: Final = 0.05
TAIL_BYTES: Final = 6000


class LaunchError(RuntimeError):
    """The mesh did not start or did not end; the message holds the tails of its logs and traces."""


class Launched:
    """One running mesh.

    ``port`` 0 is any free one. ``runtime`` is where its run directory and sockets are, ``traces`` where its traces and logs; ``close`` removes both.
    """

    def __init__(
        self,
        topology: str,
        overrides: Mapping[str, object],
        options: Sequence[str] = (),
        *,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.scratch = Path(tempfile.mkdtemp(prefix="em-", dir="/tmp"))
        self.runtime, self.traces = self.scratch / "run", self.scratch / "trace"
        self.runtime.mkdir(mode=0o700)
        self.log = self.scratch / "start.log"
        words = [f"--set={key}={_toml(value)}" for key, value in overrides.items()]
        ends = ["--topology", topology, "--port", str(self.port), "--trace-dir", str(self.traces)]
        own = {MARK: str(self.scratch), "XDG_RUNTIME_DIR": str(self.runtime), "COLUMNS": "160"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603 - our own command
                [*COMMAND, "start", *ends, *words, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**(os.environ if environment is None else environment), **own},
                start_new_session=True,
            )

    def wait_healthy(self, deadline_s: float) -> None:
        """Until /health says 200. Raises ``LaunchError`` if the mesh ends first or is late."""
        due = time.monotonic() + deadline_s
        while time.monotonic() < due:
            if self.process.poll() is not None:
                raise LaunchError(self.tell(f"edgemesh start ended with {self.process.returncode}"))
            if self.health()[0] == 200:
                return
            time.sleep(POLL_S)
        raise LaunchError(self.tell(f"not healthy after {deadline_s:g} s"))

    def health(self) -> tuple[int, str]:
        """Status and body of /health; (0, why) while nobody answers."""
        return self.get("/health")

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET; (0, why) if nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples in /metrics. Raises ``KeyError`` if it has none."""
        _, text = self.get("/metrics")
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([^ \n]+)", text, re.MULTILINE)
        if not found:
            raise KeyError(name)
        return sum(map(float, found))

    def pids(self) -> list[int]:
        """Every live process of the mesh."""
        return marked(MARK, str(self.scratch))

    def actors(self) -> dict[str, int]:
        """Actor name to process id, from the processes' own command lines."""
        found = {}
        for pid in self.pids():
            words = words_of(pid)
            if "--name" in words:
                found[words[words.index("--name") + 1]] = pid
        return dict(sorted(found.items()))

    def signal(self, number: int) -> None:
        """Signal `edgemesh start` itself."""
        self.process.send_signal(number)

    def wait(self, deadline_s: float) -> int:
        """The exit code. Raises ``LaunchError`` if the mesh does not end in time."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise LaunchError(self.tell(f"still running {deadline_s:g} s later")) from error

    def stop(self, deadline_s: float = 60.0) -> int:
        """SIGTERM, and wait; the exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait(deadline_s)

    def leftovers(self, deadline_s: float = 30.0) -> list[str]:
        """What is still there of an ended mesh once ``deadline_s`` is over: processes, files of the run, its port."""
        due = time.monotonic() + deadline_s
        while (left := self._left()) and time.monotonic() < due:
            time.sleep(POLL_S)
        return left

    def close(self) -> None:
        """Kill whatever is left and remove the directories."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def tell(self, what: str) -> str:
        """``what``, then the ends of every log and trace."""
        parts = [what, f"command: {' '.join(map(str, self.process.args))}"]  # type: ignore[arg-type]  # a list of words
        files = (self.log, *self.traces.glob("*.log"), *self.traces.glob("*.jsonl"))
        for path in files:
            tail = path.read_bytes()[-TAIL_BYTES if path == self.log else -TAIL_BYTES // 4 :].decode(errors="replace")
            if tail.strip():
                parts.append(f"--- {path}\n{tail}")
        return "\n".join(parts)

    def _left(self) -> list[str]:
        left = [f"process {pid}: {' '.join(words_of(pid))}" for pid in self.pids()]
        left += [f"file {path}" for path in self.runtime.rglob("*")]
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                left.append(f"port {self.port}")
        return left


@contextmanager
def serving(topology: str, overrides: Mapping[str, object], deadline_s: float) -> Iterator[Launched]:
    """A mesh that serves, stopped at the end. Raises ``LaunchError``."""
    launched = Launched(topology, overrides)
    try:
        launched.wait_healthy(deadline_s)
        yield launched
        launched.stop()
    finally:
        launched.close()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
