"""The router: gives each request to one group, and is out of its way from then on.

All decisions are ``decide.routing``'s; this file carries messages. A request that no group can take is answered at once,
with what the client should do.
"""

from typing import assert_never

from edgemesh.decide.owed import Owed, Word
from edgemesh.decide.routing import Choice, Config, RouterState, refusal
from edgemesh.runtime.actor import main
from edgemesh.runtime.link import LinkError, LinkFull
from edgemesh.runtime.port import Port, supervisor_of
from edgemesh.topology import Mesh
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.messages import (
    Begin,
    Drain,
    Health,
    LoadReport,
    Mark,
    Message,
    Place,
    Ready,
    Rejected,
    Stop,
    Submit,
)

RouterInbox = Submit | LoadReport | Begin | Health | Drain | Stop


class RouterActor:
    """One mesh's router."""

    def __init__(self, mesh: Mesh, name: str, epoch: int, port: Port) -> None:
        self.mesh = mesh
        self.name = name
        self.epoch = epoch
        self.port = port
        self.done = False
        topology = mesh.topology
        self.state = RouterState(
            Config(
                groups=len(mesh.groups),
                policy=topology.router.policy,
                bound=topology.router.load_bound,
                max_waiting=topology.group.max_waiting,
                max_waiting_tokens=topology.group.max_waiting_tokens,
                page_tokens=topology.engine.page_tokens,
            )
        )
        self.closed = "the server is starting; try again later"
        self.owed = Owed()

    def receive(self, kind: LinkKind, message: Message) -> None:
        """Take one message of a link of this kind."""
        del kind  # its union has been checked already
        self._take(message)  # type: ignore[arg-type]  # the links' unions make up RouterInbox

    def _take(self, message: RouterInbox) -> None:
        match message:
            case Submit():
                self._submit(message)
            case LoadReport():
                self.state.report(message)
            case Begin():
                self.port.send(LinkKind.REPORT, Ready(self.name, self.epoch), supervisor_of(self.mesh, self.name))
            case Health():
                self.closed = self._closed(message)
            case Drain():
                self.closed = "the server is shutting down; try another one"
            case Stop():
                self.done = True
            case _:
                assert_never(message)

    def _closed(self, health: Health) -> str:
        if health.draining:
            return "the server is shutting down; try another one"
        return "" if health.serving else f"the server cannot serve now: {health.reason or 'it is starting'}"

    def _submit(self, submit: Submit) -> None:
        if self.closed:
            self._reject(refusal(submit, 503, "unavailable", self.closed, 1))
            return
        choice = self.state.choose(submit)
        if isinstance(choice, Choice):
            self._place(submit, choice)
        else:
            self._reject(choice)

    def _place(self, submit: Submit, choice: Choice) -> None:
        try:
            self.port.send(LinkKind.PLACE, Place(choice.group, submit), f"group-{choice.group}")
        except LinkFull:
            reason = f"group {choice.group} has no room for more messages; try again in 1 s"
            self._reject(refusal(submit, 429, "queue_full", reason, 1))
            return
        except LinkError as error:
            self._reject(refusal(submit, 503, "no_group", f"group {choice.group} cannot be reached: {error}", 1))
            return
        self.state.place(submit, choice)
        self.port.trace.event(
            "request.placed",
            request=submit.request,
            group=choice.group,
            policy=self.state.config.policy,
            why=choice.why,
        )

    def _reject(self, rejected: Rejected) -> None:
        fields = {"request": rejected.request, "status": rejected.status, "code": rejected.code}
        self.port.trace.event("request.rejected", **fields, reason=rejected.reason)
        if rejected.gateway in self.owed or not self._said(rejected):
            self.owed.add(rejected, self.port.now())

    def _said(self, word: Word) -> bool:
        try:
            self.port.send(LinkKind.REJECT, word, f"gateway-{word.gateway}")
        except LinkError as error:
            self.port.trace.event("gateway.lost", gateway=word.gateway, error=str(error))
            return False
        return True

    def settle(self) -> None:
        """Every message is answered as it comes, unless its gateway was behind."""
        self.owed.pay(self.port.now(), self._said)

    def deadline(self) -> int | None:
        """When to try again to answer gateways that were behind."""
        return self.owed.deadline

    def marks(self) -> tuple[Mark, ...]:
        """The router has no ticks."""
        return ()


if __name__ == "__main__":
    main(RouterActor)
