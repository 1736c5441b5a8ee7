"""How the processes of a run share each card: at once, through NVIDIA's Multi-Process Service, or by turns.

A run has an MPS daemon of its own, with its pipes and logs in the run's directory; one that the same user runs already is
joined instead, and left alone at the end. The vault stays outside: what a client breaks on a card then leaves its memory whole.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from edgemesh.runtime.mps import PERCENT_KEY, PIPE_KEY, Absent, Mps, running, start
from edgemesh.topology import Actor, Topology
from edgemesh.wire.ids import Role

ORDER_KEY: Final = "CUDA_DEVICE_ORDER"
NOWHERE_DIR: Final = "no-mps"
"""An empty directory: a process that looks for a daemon there finds none, and runs on the card directly."""

COST: Final = (
    "prefill and decode take turns on each card: measured on one card, 7 % less work in all than each plane alone would do, "
    "and decode steps twice as long while prompts are read"
)


class MpsError(Exception):
    """MPS is needed and not to be had; the message says why and what to do."""


def wanted(topology: Topology) -> bool:
    """Whether two processes will share each card."""
    return topology.engine.device == "cuda" and topology.engine.kind == "model" and topology.mesh.split


def provide(topology: Topology, run_dir: Path, environment: Mapping[str, str]) -> Mps | Absent | None:
    """A daemon for the ranks of this run; ``None`` where no two processes share a card.

    Raises ``MpsError`` where the topology cannot do without.
    """
    (run_dir / NOWHERE_DIR).mkdir(mode=0o700)
    if not wanted(topology):
        return None
    if topology.engine.mps == "off":
        return Absent('engine.mps = "off"')
    found = running(environment)
    outcome = Mps(found, ours=False) if found is not None else start(run_dir, environment)
    if isinstance(outcome, Absent):
        refuse(topology, outcome)
    return outcome


def refuse(topology: Topology, absent: Absent) -> None:
    """Raise ``MpsError`` if this topology must not run without MPS.

    Ranks of several cards wait for each other inside kernels: where two planes take turns on each card, a plane's ranks
    are on their cards at different times, and each collective waits for the slowest turn.
    """
    if topology.engine.mps == "on":
        message = f'engine.mps = "on", and there is no MPS: {absent.reason}'
        raise MpsError(message)
    if topology.world > 1:
        message = (
            f"no MPS: {absent.reason}. Split planes over {topology.world} cards need it, or collectives of the two planes take turns"
            " on cards that must move together. Install the driver's MPS tools, run with mesh.split = false, or force it with"
            ' engine.mps = "off"'
        )
        raise MpsError(message)


def card_environment(
    topology: Topology, actor: Actor, mps: Mps | Absent | None, run_dir: Path, environment: Mapping[str, str]
) -> dict[str, str]:
    """What the process of an actor that uses cards is told: their order, and the daemon of its plane."""
    if topology.engine.device != "cuda" or actor.role not in {Role.VAULT, Role.RANK}:
        return {}
    told = {ORDER_KEY: environment.get(ORDER_KEY, "PCI_BUS_ID")}
    if actor.role is Role.VAULT or not isinstance(mps, Mps):
        return told | {PIPE_KEY: str(run_dir / NOWHERE_DIR)}
    # A plane keeps to its share by itself: within the daemon's, cuBLAS was seen to leave parts of its products unwritten.
    return told | {PIPE_KEY: str(mps.pipe), PERCENT_KEY: "100"}
