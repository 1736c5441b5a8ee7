"""What one gateway sends into the mesh, and what of it is still under way; all of it bounded."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol

from edgemesh.api.errors import too_busy, unavailable
from edgemesh.runtime.link import LinkError, LinkFull
from edgemesh.runtime.trace import Trace
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.messages import Cancel, Credit, Message, Submit

UNDER_WAY_BYTES: Final = 256 << 20
"""Prompts that may be on their way to a group at once: links count messages, and one prompt may be megabytes."""

UNSENT: Final = 1 << 16
"""Requests whose group's link is full and that have a word waiting for it; beyond that the oldest word is dropped:
a request that nobody cancels ends by itself, and one without credit at its group's deadline for slow clients."""


class Sender(Protocol):
    """What of an actor's port the gateway's parts use."""

    trace: Trace

    def send(self, kind: LinkKind, message: Message, to: str) -> None:
        """Send without waiting; raises ``LinkError``."""

    def now(self) -> int:
        """Monotonic nanoseconds."""


class Outbox:
    """The way to the router and the groups.

    A prompt is under way until the router or a group says a word on its request.
    """

    def __init__(self, port: Sender) -> None:
        self._port = port
        self._under_way: dict[str, int] = {}
        self.under_way_bytes = 0
        self._unsent: OrderedDict[str, tuple[Cancel | Credit, int]] = OrderedDict()

    def submit(self, submit: Submit) -> None:
        """Send a request to the router. Raises ``ApiError`` where it cannot take it."""
        nbytes = submit.prompt.buffer.nbytes
        if self.under_way_bytes and self.under_way_bytes + nbytes > UNDER_WAY_BYTES:
            message = "the prompts that are on their way to the mesh are more than it can take now"
            raise too_busy(message, 1)
        try:
            self._port.send(LinkKind.SUBMIT, submit, "router-0")
        except LinkFull as error:
            message = "the mesh has more requests than it can take now"
            raise too_busy(message, 1) from error
        except LinkError as error:
            message = f"the router cannot be reached: {error}"
            raise unavailable(message) from error
        self._under_way[submit.request] = nbytes
        self.under_way_bytes += nbytes

    def arrived(self, request: str) -> None:
        """The router or a group has the request."""
        self.under_way_bytes -= self._under_way.pop(request, 0)

    def steer(self, message: Cancel | Credit, group: int) -> None:
        """To the group of a request; what its link does not take now waits, and replaces what waited before it."""
        self._unsent.pop(message.request, None)
        self._sent(message, group)

    def retry(self) -> None:
        """Send what full links did not take; of a link that is full still, nothing more is tried."""
        waiting, self._unsent = self._unsent, OrderedDict()
        full: set[int] = set()
        for request, (message, group) in waiting.items():
            if group in full:
                self._unsent[request] = (message, group)
            elif not self._sent(message, group):
                full.add(group)

    def _sent(self, message: Cancel | Credit, group: int) -> bool:
        """Whether the group's link took it, or never will; else it waits."""
        try:
            self._port.send(LinkKind.STEER, message, f"group-{group}")
        except LinkFull:
            self._unsent[message.request] = (message, group)
            if len(self._unsent) > UNSENT:
                self._unsent.popitem(last=False)
            return False
        except LinkError as error:
            # The group is gone, and its requests with it.
            self._port.trace.event("steer.unsent", request=message.request, error=str(error))
        return True
