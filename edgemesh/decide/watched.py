"""What the supervisor knows of one actor, and how it says who is late."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from edgemesh.decide.stalls import describe, whereabouts
from edgemesh.topology import Actor
from edgemesh.wire.ids import Role
from edgemesh.wire.messages import Loading, Mark

ORDER: Final = (Role.VAULT, Role.RANK, Role.BARRIER, Role.ROUTER, Role.GATEWAY, Role.GROUP)
"""Who waits for whom at the start: each for those before it. The first that is late is to blame."""


@dataclass(slots=True)
class Watched:
    """What is known of one actor."""

    actor: Actor
    alive: bool = False
    hello: bool = False
    ready: bool = False
    drained: bool = False
    stopped: bool = False
    heard_ns: int = 0
    marks: tuple[Mark, ...] = ()
    loading: Loading | None = None

    def step(self, now: int, *, vault_ready: bool) -> str:
        """What an actor that is not ready is doing, as far as it has said."""
        if self.loading is not None:
            done, total = self.loading.done_bytes / 1e6, self.loading.total_bytes / 1e6
            return f"{self.loading.step}, {done:.0f} of {total:.0f} MB"
        if not self.hello:
            return "its process runs but has not said hello (still importing)"
        if not vault_ready and self.actor.role is not Role.VAULT:
            return "waiting for the vault"
        return whereabouts(self.marks, now)


def late(watched: Collection[Watched], started_ns: int, now: int) -> tuple[str, str]:
    """Who is late at the start deadline, and the sentence that says at which step."""
    behind = [each for each in watched if not each.ready]
    each = min(behind, key=lambda other: (ORDER.index(other.actor.role), other.hello))
    vault_ready = all(other.ready for other in watched if other.actor.role is Role.VAULT)
    step = each.step(now, vault_ready=vault_ready)
    more = f" ({len(behind) - 1} more wait for it or are late themselves)" if len(behind) > 1 else ""
    waited = (now - started_ns) / 1e9
    remedy = "raise supervisor.start_deadline_s if this machine is slow"
    return each.actor.name, f"not ready after {waited:.0f} s: {describe(each.actor)}, {step}{more}; {remedy}"
