"""An unexpected exception is told: on standard error, in the trace, and to the supervisor."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from edgemesh.runtime.link import LinkError
from edgemesh.runtime.zmq import ZmqPort
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.messages import Fault

FAULT: Final = 70
"""Exit code of an actor that met an unexpected exception (EX_SOFTWARE)."""


@dataclass(slots=True)
class Outcome:
    """The exit code that an actor's life came to."""

    code: int = 0


@contextmanager
def faults_told(port: ZmqPort, supervisor: str) -> Iterator[Outcome]:
    """Trace an unexpected exception, report it as a ``Fault``, and give it the exit code ``FAULT``."""
    outcome = Outcome()
    try:
        yield outcome
    except Exception as error:  # noqa: BLE001 - whatever it is, the supervisor must hear of it
        outcome.code = FAULT
        _tell(port, supervisor, error)


def _tell(port: ZmqPort, supervisor: str, error: Exception) -> None:
    stack = "".join(traceback.format_exception(error))
    sys.stderr.write(stack)
    port.trace.event("actor.fault", error=repr(error), stack=stack)
    reason = f"{type(error).__name__}: {error}"[:1000]
    try:
        port.send(LinkKind.REPORT, Fault(port.name, port.epoch, reason), supervisor)
    except LinkError as unsent:
        port.trace.event("fault.unsent", error=str(unsent))
