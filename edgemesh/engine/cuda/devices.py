"""Which card a rank uses, and what must hold of a process before it touches one."""

from collections.abc import Mapping

import torch

from edgemesh.engine.memory import MemoryFault
from edgemesh.topology import Mesh
from edgemesh.topology.machine import unshareable
from edgemesh.wire.ids import Role


def ranks_on(mesh: Mesh, host: int) -> list[int]:
    """The rank numbers of a host, in order; both planes of a number share one card."""
    return sorted({actor.index for actor in mesh.actors_of(Role.RANK) if actor.host == host})


def device_of(mesh: Mesh, rank: int) -> int:
    """The card of a rank, by its number among those that its host's processes see."""
    host = next(actor.host for actor in mesh.actors_of(Role.RANK) if actor.index == rank)
    return ranks_on(mesh, host).index(rank)


def check_allocator(environment: Mapping[str, str]) -> None:
    """Raise ``MemoryFault`` if torch was told to allocate memory that other processes cannot open."""
    if fault := unshareable(environment):
        raise MemoryFault(fault)


def check_devices(needed: int) -> None:
    """Raise ``MemoryFault`` unless torch sees so many cards that run bfloat16 kernels."""
    if torch.version.cuda is None:
        message = f"torch {torch.__version__} was built without CUDA; install a CUDA build of it"
        raise MemoryFault(message)
    found = torch.cuda.device_count()
    if found < needed:
        message = f"{needed} ranks of a plane run here, one on each GPU, and torch sees {found}"
        raise MemoryFault(message)
    for device in range(needed):
        if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
            name = torch.cuda.get_device_name(device)
            message = f"GPU {device} ({name}) has compute capability {capability[0]}.{capability[1]}; 8.0 is the least"
            raise MemoryFault(message)


def uuid_of(device: int) -> str:
    """The name of a card that no other has, whatever the order of the cards."""
    return str(torch.cuda.get_device_properties(device).uuid)
