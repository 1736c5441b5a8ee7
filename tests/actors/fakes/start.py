"""``python -m fakes.start TRACE_DIR [section.key=value ...]``: a supervisor over fake actors."""

import os
import sys
import time

from rich.console import Console

from edgemesh.actors.supervisor import supervise
from edgemesh.cli.start_view import PlainView
from edgemesh.topology import parse

trace, *overrides = sys.argv[1:]
topology = parse("", ["gateway.port=0", f"trace.dir={trace}", *overrides])
start_ns = time.monotonic_ns() - int(os.environ.get("PULLED_FOR_S", "0")) * 1_000_000_000
sys.exit(supervise(topology, PlainView(Console()), start_ns=start_ns, package="fakes"))
