"""From a lease to a running engine: memory, threads, collectives, a first forward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from edgemesh.engine.collectives import Backend, Collectives, Deadline, Group
from edgemesh.engine.gloo import GlooBackend
from edgemesh.engine.immediate import Immediate
from edgemesh.engine.layout import Split
from edgemesh.engine.lease import lease
from edgemesh.engine.runner import Runner
from edgemesh.engine.shared import LINE_BYTES, SharedBackend, usable
from edgemesh.engine.store import COLLECTIVE
from edgemesh.engine.turns import Limits, Station
from edgemesh.topology import Mesh
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Lease

if TYPE_CHECKING:
    from edgemesh.engine.cuda.runner import CudaRunner

Say = Callable[[str], None]
"""Told what is being done, step by step."""


class CollectivesUnavailableError(RuntimeError):
    """The collectives that the topology names cannot work between these ranks."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank process: its number, plane and epoch, and where its vault listens."""

    mesh: Mesh
    name: str
    rank: int
    plane: Plane
    epoch: int
    vault: Path

    @property
    def group(self) -> int:
        """The rank's group."""
        return self.mesh.group_of(self.rank)

    @property
    def world(self) -> tuple[int, ...]:
        """The ranks of its coupled set."""
        return self.mesh.world_of(self.mesh.set_of(self.group).index)


def boot(member: Member, station: Station, sizes: Sequence[int], say: Say) -> "Immediate | CudaRunner":
    """Lease, meet the other ranks and warm up; raises what is in the way.

    ``sizes`` are the padded batches that verdicts ask graphs for. Every rank returns only when all have come this far.
    """
    mesh = member.mesh
    torch.set_num_threads(mesh.threads)
    say("leasing memory")
    leased = lease(member.vault, Lease(member.name, member.epoch, member.rank, member.plane))
    capacity = leased.grant.capacity
    part = mesh.split_of(member.rank)
    limits = Limits(
        capacity.pages, capacity.page_tokens, mesh.topology.decode.slots, capacity.max_model_len, leased.shape.vocab
    )
    say("meeting the other ranks")
    deadline = Deadline(int(mesh.topology.supervisor.start_deadline_s * 1e9))
    collectives = connect(member, leased.tensors.get(COLLECTIVE), deadline)
    split = Split(part.attn_tp, part.attn_rank, part.mlp_tp, part.mlp_rank)
    if mesh.topology.engine.device == "cuda":
        from edgemesh.engine.cuda.start import start  # noqa: PLC0415 - where there are cards

        ahead = start(mesh.topology, station, limits, leased, split, collectives, sizes, say)
        collectives.world.barrier()
        return ahead
    runner = Runner(station, limits, leased.shape, split, leased.tensors, collectives)
    say("warming up")
    runner.warm_up()
    collectives.world.barrier()
    return Immediate(runner)


def connect(member: Member, region: Tensor | None, deadline: Deadline) -> Collectives:
    """The rank's groups over what the topology names: ``auto`` is shared memory where all ranks of the set share a host."""
    attn_ranks, world = member.mesh.ranks_of(member.group), member.world
    make = _maker(member, region, deadline) if len(world) > 1 else _alone

    def group(name: str, ranks: tuple[int, ...]) -> Group:
        rank, size = ranks.index(member.rank), len(ranks)
        return Group(name, rank, size, make(name, rank, size) if size > 1 else None)

    attn = group("attn", attn_ranks)
    scatters = member.mesh.topology.engine.exchange == "scatter"
    return Collectives(attn, attn if attn_ranks == world else group("world", world), deadline, scatters=scatters)


Make = Callable[[str, int, int], Backend]


def _alone(name: str, _rank: int, size: int) -> Backend:
    message = f"group {name!r} of {size} ranks in a world of one"
    raise CollectivesUnavailableError(message)


def _maker(member: Member, region: Tensor | None, deadline: Deadline) -> Make:
    if member.mesh.topology.engine.device == "cuda":
        from edgemesh.engine.cuda.nccl import maker  # noqa: PLC0415 - where there are cards

        return maker(member.plane, _prefixes(member), _store(member, deadline), deadline)
    wanted = member.mesh.topology.engine.collectives
    if wanted == "shm" and (region is None or not usable()):
        message = (
            "engine.collectives: 'shm' needs all ranks of a coupled set on one x86-64 host; allowed: 'auto', 'gloo'"
        )
        raise CollectivesUnavailableError(message)
    if wanted == "gloo" or region is None or not usable():
        return _gloo(member, deadline)
    return _shared(member, region, deadline)


def _shared(member: Member, region: Tensor, deadline: Deadline) -> Make:
    """Half of the set's region is the world's, the other half is dealt to its groups."""
    half = region.numel() // 2
    attn_tp = member.mesh.attn_tp
    member_index = member.world.index(member.rank) // attn_tp
    # Whole cache lines, or the counters of all but the first group would be torn across two.
    share = half // (len(member.world) // attn_tp) // LINE_BYTES * LINE_BYTES
    begin = half + member_index * share
    areas = {"world": region[:half], "attn": region[begin : begin + share]}

    def make(name: str, rank: int, size: int) -> Backend:
        return SharedBackend(name, rank, size, areas[name], member.epoch, deadline)

    return make


def _gloo(member: Member, deadline: Deadline) -> Make:
    mesh, world = member.mesh, member.world
    hosts = mesh.topology.mesh.hosts
    host = hosts[mesh.actor(member.name).host]
    store = _store(member, deadline)
    prefixes = _prefixes(member)
    assert member.rank in world

    def make(name: str, rank: int, size: int) -> Backend:
        return GlooBackend(name, rank, size, PrefixStore(prefixes[name], store), host, deadline)

    return make


def _prefixes(member: Member) -> dict[str, str]:
    """What a rank's groups are called in their set's store."""
    return {"world": "world", "attn": f"attn-{member.group}"}


def _store(member: Member, deadline: Deadline) -> Store:
    """Where the ranks of a coupled set find each other; its name or prefix holds the epoch.

    On one host a file of the run's directory; else the set's first rank listens just below ``mesh.base_port``.
    """
    mesh, world = member.mesh, member.world
    index = mesh.set_of(member.group).index
    name = f"{index}-{member.plane}-{member.epoch}"
    hosts = [mesh.actor(f"rank-{rank}.{member.plane}").host for rank in world]
    timeout = timedelta(seconds=deadline.left_s)
    if len(set(hosts)) == 1:
        directory = Path(mesh.run_dir) / "coll"
        directory.mkdir(mode=0o700, exist_ok=True)
        store: Store = FileStore(str(directory / name), len(world))
        store.set_timeout(timeout)
        return store
    port = mesh.topology.mesh.base_port - 1 - len(mesh.planes) * index - mesh.planes.index(member.plane)
    address = mesh.topology.mesh.hosts[hosts[0]]
    leads = member.rank == world[0]
    return PrefixStore(name, TCPStore(address, port, len(world), leads, timeout, wait_for_workers=False))
