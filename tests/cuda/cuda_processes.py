"""Processes of the tests on cards, which say what they did in lines of JSON."""

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parent / "cuda_rank.py"


class Rank:
    """One process of ``cuda_rank.py``."""

    def __init__(self, *arguments, **environment):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            bufsize=0,
        )

    def line(self, timeout=150.0):
        """The next line, or a failure with what the process complained of."""
        end = time.monotonic() + timeout
        text = b""
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                assert waiting.select(max(0.0, end - time.monotonic())), f"silent for {timeout} s"
                part = self.process.stdout.read(1)
                assert part, self.process.stderr.read().decode()[-3000:]
                text += part
        return json.loads(text)

    def close(self):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()
