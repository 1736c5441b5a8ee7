"""A rank's engine on its card: kernels chosen, everything compiled, graphs captured before the first plan."""

from collections.abc import Callable, Sequence

import torch

from edgemesh.engine.collectives import Collectives
from edgemesh.engine.cuda.attention import choose
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
    # A decode step is short and someone waits for each: its blocks go first where both planes have some to place.
    priority = -1 if station.plane is Plane.DECODE else 0
    torch.cuda.set_stream(torch.cuda.Stream(device, priority))  # type: ignore[no-untyped-call]  # torch leaves it so
    say("trying matrix products")
    prove_products(leased.tensors, topology.prefill.chunk_tokens)
    attention = choose(topology.engine.attention, limits.page_tokens, leased.shape.head_dim, say)
    runner = CudaRunner(station, limits, leased.shape, split, leased.tensors, collectives, attention, sizes)
    say("warming up")
    runner.warm_up(topology.prefill.chunk_tokens, say)
    return runner
