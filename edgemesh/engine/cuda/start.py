"""A rank's engine on its card: kernels chosen, everything compiled, graphs captured before the first plan."""

from collections.abc import Callable, Sequence

import torch

from edgemesh.engine.collectives import Collectives
from edgemesh.engine.cuda.attention import choose
from edgemesh.engine.cuda.partition import Part, part_of
from edgemesh.engine.cuda.proof import prove_products
from edgemesh.engine.cuda.runner import CudaRunner
from edgemesh.engine.layout import Split
from edgemesh.engine.lease import Leased
from edgemesh.engine.shape import ModelError
from edgemesh.engine.turns import Limits, Station
from edgemesh.topology import Topology
from edgemesh.wire.ids import Plane


def start(
    topology: Topology,
    station: Station,
    limits: Limits,
    leased: Leased,
    split: Split,
    collectives: Collectives,
    sizes: Sequence[int],
    say: Callable[[str], None],
) -> CudaRunner:
    """A runner that is ready; from here on this process works on one stream of its card. All ranks of a set do this together.

    Raises ``ModelError`` for a model that does not run on cards, ``AttentionUnavailableError`` for kernels that do not run here.
    """
    if leased.shape.dtype != "bfloat16":
        message = f'model.dtype = "{leased.shape.dtype}" does not run on CUDA; allowed: "bfloat16"'
        raise ModelError(message)
    device = leased.tensors["kv"].device
    torch.cuda.set_device(device)
    part = _part(topology, station.plane, device)
    torch.cuda.set_stream(part.stream)
    if part.processors < torch.cuda.get_device_properties(device).multi_processor_count:
        say(f"this plane's part of the card: {part.processors} multiprocessors")
    say("trying matrix products")
    prove_products(leased.tensors, topology.prefill.chunk_tokens)
    attention = choose(topology.engine.attention, limits.page_tokens, leased.shape.head_dim, say)
    runner = CudaRunner(station, limits, leased.shape, split, leased.tensors, collectives, attention, sizes)
    say("warming up")
    runner.warm_up(topology.prefill.chunk_tokens, say)
    return runner


def _part(topology: Topology, plane: Plane, device: torch.device) -> Part:
    """The plane's share of the card; one process for both has all of it.

    A decode step is short and someone waits for each: its blocks go first where both planes have some to place.
    """
    shares = {Plane.PREFILL: topology.prefill.sm_percent, Plane.DECODE: topology.decode.sm_percent}
    return part_of(device, shares.get(plane, 100), -1 if plane is Plane.DECODE else 0)
