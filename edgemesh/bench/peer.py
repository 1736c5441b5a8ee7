"""Another engine on the same machine and weights: started, waited for, and stopped."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from edgemesh.bench.launch import free_port

START_S: Final = 300.0


@contextmanager
def served(command: str, model: str, log: Path) -> Iterator[str]:
    """``COMMAND serve MODEL`` with the peer's own settings but eager execution; stopped at the end."""
    port = free_port()
    words = [command, "serve", model, "--dtype", "bfloat16", "--enforce-eager", "--port", str(port)]
    words += ["--max-model-len", "2048"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    with log.open("ab") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=environment, start_new_session=True)  # noqa: S603 - named by the user
    url = f"http://127.0.0.1:{port}"
    try:
        wait_healthy(process, url, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Until the server answers ``/health``. Raises ``RuntimeError`` with the end of its log if it ends first or is late."""
    due = time.monotonic() + START_S
    while time.monotonic() < due and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", int(url.rpartition(":")[2]), timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.2)
        finally:
            connection.close()
    message = f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}"
    raise RuntimeError(message)
