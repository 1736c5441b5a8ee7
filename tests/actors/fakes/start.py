"""``python -m fakes.start TRACE_DIR [section.key=value ...]``: a supervisor over fake actors."""

import sys

from rich.console import Console

from edgemesh.actors.supervisor import supervise
from edgemesh.cli.start_view import PlainView
from edgemesh.topology import parse

trace, *overrides = sys.argv[1:]
topology = parse("", ["gateway.port=0", f"trace.dir={trace}", *overrides])
sys.exit(supervise(topology, PlainView(Console()), package="fakes"))
