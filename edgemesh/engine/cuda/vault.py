"""What a vault holds on cards: each rank's weights and one KV slab on its own card, lent by the driver's handles.

Weights go from the mapped files, or from where they are drawn, to the cards piece by piece: the host's memory never holds
the model. Both planes of a rank open the same two allocations, so a card has each byte once.
"""

import os
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import torch

from edgemesh.engine.capacity import KvBudget
from edgemesh.engine.checkpoint import Checkpoint
from edgemesh.engine.cuda.budget import Card, CardBudget, deal
from edgemesh.engine.cuda.devices import check_allocator, check_devices, ranks_on, uuid_of
from edgemesh.engine.cuda.ipc import DeviceRegion
from edgemesh.engine.layout import Split, Target, local, targets
from edgemesh.engine.memory import Packing
from edgemesh.engine.shape import ModelShape
from edgemesh.engine.store import KV, Register
from edgemesh.engine.weights import DTYPES, fill
from edgemesh.topology import Mesh
from edgemesh.wire.messages import Capacity, CardMemory, Grant, Lease

ALIGN_BYTES: Final = 256
"""Tensors begin where ``cudaMalloc`` itself would put them."""


class CardStore:
    """The allocations on the cards of one host; the i-th of its ranks is on the i-th card. Raises ``MemoryFault``."""

    def __init__(self, mesh: Mesh, host: int, shape: ModelShape) -> None:
        check_allocator(os.environ)
        self.mesh = mesh
        self.shape = shape
        self.ranks = ranks_on(mesh, host)
        check_devices(len(self.ranks))
        self._register = Register(mesh, host)
        self._cards = [_card(device) for device in range(len(self.ranks))]
        self._targets = [list(targets(shape, self._split(rank))) for rank in self.ranks]
        self._packings = [_packed(each, shape.dtype) for each in self._targets]
        self._slab = Packing(ALIGN_BYTES)
        self._weights: list[DeviceRegion] = []
        self._slabs: list[DeviceRegion] = []
        self._handles: list[tuple[bytes, ...]] = []
        self._budgets: tuple[CardBudget, ...] = ()

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights on all cards."""
        return sum(packing.nbytes for packing in self._packings)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all slabs."""
        return self._slab.nbytes * len(self.ranks)

    def load(self, checkpoint: Checkpoint, progress: Callable[[str, int], None]) -> None:
        """Fill every card's weights. Raises ``ModelError`` or ``MemoryFault``."""
        for device, packing in enumerate(self._packings):
            region = DeviceRegion.create("the weights", packing.nbytes, device)
            region.tensor(0, torch.uint8, (packing.nbytes,)).zero_()
            self._weights.append(region)
        fill(checkpoint, self._places(), progress)
        for device in range(len(self.ranks)):
            torch.cuda.synchronize(device)

    def allot(self) -> KvBudget:
        """Make the KV slabs. Raises ``ModelError`` or ``MemoryFault``."""
        # What torch kept of the pieces that passed through the cards.
        torch.cuda.empty_cache()
        weights = max(packing.nbytes for packing in self._packings)
        kv, self._budgets = deal(self.mesh.topology, self.shape, self._cards, weights)
        heads = local(self.shape, self._split(self.ranks[0])).kv_local
        shape = (self.shape.layers, 2, kv.pages, kv.page_tokens, heads, self.shape.head_dim)
        self._slab.add(KV, self.shape.dtype, shape)
        for device in range(len(self.ranks)):
            region = DeviceRegion.create("the KV cache", self._slab.nbytes, device)
            # Attention multiplies what it masks by zero: no page may hold what is not a number.
            region.tensor(0, torch.uint8, (self._slab.nbytes,)).zero_()
            self._slabs.append(region)
            self._handles.append((self._weights[device].handle(), region.handle()))
        for device in range(len(self.ranks)):
            torch.cuda.synchronize(device)
        return kv

    def budget(self) -> str:
        """Each card's, one a line."""
        return "\n".join(map(str, self._budgets))

    def grant(self, lease: Lease, capacity: Capacity) -> tuple[Grant, list[int]]:
        """What a rank gets; no descriptor goes with it. Raises ``UnknownLease``."""
        self._register.enter(lease)
        device = self.ranks.index(lease.rank)
        regions = [self._weights[device], self._slabs[device]]
        places = [*self._packings[device].on_wire(0), *self._slab.on_wire(1)]
        grant = Grant(
            rank=lease.rank,
            epoch=lease.epoch,
            capacity=capacity,
            shape=msgspec.json.encode(self.shape),
            region_bytes=tuple(region.nbytes for region in regions),
            tensors=tuple(places),
            card=CardMemory(device, uuid_of(device), str(torch.__version__), self._handles[device]),
        )
        return grant, []

    def _split(self, rank: int) -> Split:
        part = self.mesh.split_of(rank)
        return Split(part.attn_tp, part.attn_rank, part.mlp_tp, part.mlp_rank)

    def _places(self) -> Iterator[tuple[Target, torch.Tensor]]:
        """Every target of every card, equal names together, so that a source tensor is read for all cards at once."""
        for same in zip(*self._targets, strict=True):
            for device, target in enumerate(same):
                if not target.same_as:
                    offset, shape, dtype = self._packings[device].places[target.name]
                    yield target, self._weights[device].tensor(offset, DTYPES[dtype], shape)


def _card(device: int) -> Card:
    """A card as this process finds it, its own context made first."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
    return Card(device, total, total - free)


def _packed(every: list[Target], dtype: str) -> Packing:
    packing = Packing(ALIGN_BYTES)
    for target in every:
        if target.same_as:
            packing.alias(target.name, target.same_as)
        else:
            packing.add(target.name, dtype, target.shape)
    return packing
