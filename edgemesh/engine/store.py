"""What a vault holds: one region for each distinct shard of the weights on its host, and one KV slab per rank.

Equal ranks of all attention groups read the same attention shard, equal MLP ranks the same MLP shard, and everyone the
norms; both planes of a rank map one slab. So each byte of weights is on the host once, however many processes read it.
"""

from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgspec
import torch

from edgemesh.engine.capacity import KvBudget, free_memory, kv_budget
from edgemesh.engine.checkpoint import Checkpoint
from edgemesh.engine.layout import Share, Split, Target, local, targets
from edgemesh.engine.memory import Packing, Region
from edgemesh.engine.shape import ModelShape
from edgemesh.engine.shared import region_bytes
from edgemesh.engine.weights import DTYPES, fill
from edgemesh.topology import Mesh
from edgemesh.wire.ids import Plane, Role
from edgemesh.wire.messages import Capacity, Grant, Lease, TensorPlace

COLLECTIVE: Final = "coll"
KV: Final = "kv"

Key = tuple[Share, int]


class UnknownLease(Exception):  # noqa: N818 - it names what happened
    """A lease of a rank that is not this host's, or of an epoch that is over."""


class Register:
    """Who may lease: the ranks of one host, each in the latest epoch of its coupled set that it has been asked in."""

    def __init__(self, mesh: Mesh, host: int) -> None:
        self._mesh = mesh
        self._host = host
        self._epochs: dict[int, int] = {}

    def enter(self, lease: Lease) -> bool:
        """Whether the lease opens a new epoch of its set. Raises ``UnknownLease``."""
        try:
            actor = self._mesh.actor(lease.actor)
        except KeyError:
            actor = None
        wanted = (Role.RANK, self._host, lease.rank, lease.plane)
        if actor is None or (actor.role, actor.host, actor.index, actor.plane) != wanted:
            message = f"{lease.actor} (rank {lease.rank}, {lease.plane}) is no rank of host {self._host}"
            raise UnknownLease(message)
        index = self._mesh.set_of(self._mesh.group_of(lease.rank)).index
        if lease.epoch < (epoch := self._epochs.setdefault(index, lease.epoch)):
            message = f"{lease.actor} asks in epoch {lease.epoch}, and epoch {epoch} has begun"
            raise UnknownLease(message)
        self._epochs[index] = lease.epoch
        return lease.epoch > epoch


class Holdings(Protocol):
    """What a vault holds and lends, in the host's memory or on its cards."""

    shape: ModelShape

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights, each counted once."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of all slabs."""

    def load(self, checkpoint: Checkpoint, progress: Callable[[str, int], None]) -> None:
        """Fill the weights. Raises ``ModelError``."""

    def allot(self) -> KvBudget:
        """Make the KV slabs from what is left. Raises ``ModelError`` if they would not hold what they must."""

    def budget(self) -> str:
        """Where the memory goes, in words, if there is more to say than the bytes above."""

    def grant(self, lease: Lease, capacity: Capacity) -> tuple[Grant, list[int]]:
        """What a rank gets, and the descriptors to send with it. Raises ``UnknownLease``."""


class _Shard:
    """One region of weights: where each tensor lies, and which rank's indices fill it."""

    def __init__(self) -> None:
        self.packing = Packing()
        self.targets: list[Target] = []
        self.region: Region | None = None


class Store:
    """The regions of one host."""

    def __init__(self, mesh: Mesh, host: int, shape: ModelShape) -> None:
        self.mesh = mesh
        self.shape = shape
        self.ranks = sorted({actor.index for actor in mesh.actors_of(Role.RANK) if actor.host == host})
        self._shards: dict[Key, _Shard] = {}
        self._slabs: dict[int, Region] = {}
        self._collectives: dict[tuple[int, Plane], Region] = {}
        self._register = Register(mesh, host)
        self._slab = Packing()
        for rank in self.ranks:
            self._plan(rank)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights, each counted once."""
        return sum(shard.packing.nbytes for shard in self._shards.values())

    @property
    def kv_bytes(self) -> int:
        """Bytes of all slabs."""
        return self._slab.nbytes * len(self.ranks)

    def load(self, checkpoint: Checkpoint, progress: Callable[[str, int], None]) -> None:
        """Fill every shard, then seal it. Raises ``ModelError``."""
        for (share, index), shard in self._shards.items():
            shard.region = Region.create(f"{share}-{index}", shard.packing.nbytes)
        fill(checkpoint, self._places(), progress)
        for shard in self._shards.values():
            assert shard.region is not None
            shard.region.seal()

    def measure(self) -> KvBudget:
        """The KV that fits into what is free. Raises ``ModelError`` if that is too little."""
        return kv_budget(self.mesh.topology, self.shape, len(self.ranks), free_memory())

    def budget(self) -> str:
        """Nothing: a host's memory is not dealt out as a card's is."""
        return ""

    def allot(self) -> KvBudget:
        """Make the KV slabs."""
        kv = self.measure()
        heads = local(self.shape, self._split(self.ranks[0])).kv_local
        shape = (self.shape.layers, 2, kv.pages, kv.page_tokens, heads, self.shape.head_dim)
        self._slab = Packing()
        self._slab.add(KV, self.shape.dtype, shape)
        self._slabs = {rank: Region.create(f"kv-{rank}", self._slab.nbytes) for rank in self.ranks}
        return kv

    def grant(self, lease: Lease, capacity: Capacity) -> tuple[Grant, list[int]]:
        """What a rank gets, and the descriptors to send with it. Raises ``UnknownLease``."""
        if self._register.enter(lease):
            self._forget(self.mesh.group_of(lease.rank))
        regions: list[Region] = []
        places: list[TensorPlace] = []
        for key in self._keys(lease.rank):
            shard = self._shards[key]
            if shard.region is not None:
                places += shard.packing.on_wire(len(regions))
                regions.append(shard.region)
        if lease.rank in self._slabs:
            places += self._slab.on_wire(len(regions))
            regions.append(self._slabs[lease.rank])
        shared = self._collective(lease)
        if shared is not None:
            packing = Packing()
            packing.add(COLLECTIVE, "uint8", (shared.nbytes,))
            places += packing.on_wire(len(regions))
            regions.append(shared)
        grant = Grant(
            rank=lease.rank,
            epoch=lease.epoch,
            capacity=capacity,
            shape=msgspec.json.encode(self.shape),
            region_bytes=tuple(region.nbytes for region in regions),
            tensors=tuple(places),
        )
        return grant, [region.fd for region in regions]

    def _split(self, rank: int) -> Split:
        part = self.mesh.split_of(rank)
        return Split(part.attn_tp, part.attn_rank, part.mlp_tp, part.mlp_rank)

    def _key(self, rank: int, share: Share) -> Key:
        split = self._split(rank)
        return share, {Share.COMMON: 0, Share.ATTENTION: split.attn_rank, Share.MLP: split.mlp_rank}[share]

    def _keys(self, rank: int) -> list[Key]:
        return [self._key(rank, share) for share in Share]

    def _plan(self, rank: int) -> None:
        new = [key for key in self._keys(rank) if key not in self._shards]
        self._shards |= {key: _Shard() for key in new}
        for target in targets(self.shape, self._split(rank)):
            key = self._key(rank, target.share)
            if key not in new:
                continue
            shard = self._shards[key]
            if target.same_as:
                shard.packing.alias(target.name, target.same_as)
            else:
                shard.packing.add(target.name, self.shape.dtype, target.shape)
                shard.targets.append(target)

    def _places(self) -> Iterator[tuple[Target, torch.Tensor]]:
        """Every target of every shard, equal names together, so that a source tensor is read by all its shards at once."""
        order: dict[str, list[tuple[_Shard, Target]]] = {}
        for shard in self._shards.values():
            for target in shard.targets:
                order.setdefault(target.name, []).append((shard, target))
        for name, both in order.items():
            for shard, target in both:
                assert shard.region is not None
                offset, shape, dtype = shard.packing.places[name]
                yield target, shard.region.tensor(offset, DTYPES[dtype], shape)

    def _forget(self, group: int) -> None:
        """Let go of the collective regions of an epoch that is over."""
        index = self.mesh.set_of(group).index
        for plane in self.mesh.planes:
            if old := self._collectives.pop((index, plane), None):
                old.close()

    def _collective(self, lease: Lease) -> Region | None:
        """The region over which a coupled set's ranks of one plane exchange tensors; each epoch has a fresh one."""
        index = self.mesh.set_of(self.mesh.group_of(lease.rank)).index
        ranks = self.mesh.world_of(index)
        if len(ranks) == 1 or not set(ranks) <= set(self.ranks):
            return None
        key = index, lease.plane
        if key not in self._collectives:
            # One part for all ranks of the set, and one for each of its groups.
            groups = len(ranks) // self.mesh.attn_tp
            nbytes = region_bytes(len(ranks)) + groups * region_bytes(self.mesh.attn_tp)
            self._collectives[key] = Region.create(f"coll-{index}-{lease.plane}", nbytes)
        return self._collectives[key]
