"""How many KV pages fit, and how long a request may be: arithmetic over the model, the topology and what is free."""

from pathlib import Path
from typing import Final

import msgspec

from edgemesh.engine.layout import Split, local
from edgemesh.engine.shape import ModelError, ModelShape
from edgemesh.topology import Topology
from edgemesh.wire.ids import MAX_PAGES

PROCESS_BYTES: Final = 400 << 20
"""What a CPU rank takes beside weights and KV: the interpreter, torch, and activations of one step."""

_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2}


class KvBudget(msgspec.Struct, frozen=True):
    """KV of each rank: ``pages`` of ``page_tokens`` (page 0, the scratch page, included), and the longest request."""

    pages: int
    page_tokens: int
    max_model_len: int


def page_bytes(shape: ModelShape, attn_tp: int, page_tokens: int) -> int:
    """Bytes of one page on one rank: keys and values of all layers."""
    heads = local(shape, Split(attn_tp=attn_tp)).kv_local
    return shape.layers * 2 * page_tokens * heads * shape.head_dim * _ITEM_BYTES[shape.dtype]


def kv_budget(topology: Topology, shape: ModelShape, ranks: int, free_bytes: int) -> KvBudget:
    """The KV of each of a host's ``ranks``, given what is free beside the weights.

    With ``kv_pages`` unset, a CPU host gives the stated share of its free memory, and no more than is of use: room for a
    few of the longest requests and for every slot at a moderate length. Raises ``ModelError`` if the stated ``max_model_len`` cannot
    be held or the model was not made for it.
    """
    page_tokens, stated = topology.engine.page_tokens, topology.model.max_model_len
    longest = _longest(shape, stated)
    pages = topology.engine.kv_pages
    if pages == 0:
        usable = int(free_bytes * topology.engine.memory_fraction) - ranks * len(topology.planes) * PROCESS_BYTES
        fitting = usable // (ranks * page_bytes(shape, topology.attn_tp, page_tokens))
        useful = 4 * longest + 512 * topology.decode.slots
        pages = max(0, min(fitting, -(-useful // page_tokens) + 1, MAX_PAGES - 1))
    return holding(topology, shape, pages, ranks)


def holding(topology: Topology, shape: ModelShape, pages: int, ranks: int) -> KvBudget:
    """So many pages on each of ``ranks``. Raises ``ModelError`` if they do not hold the requests that must be held."""
    page_tokens, stated = topology.engine.page_tokens, topology.model.max_model_len
    longest = _longest(shape, stated)
    held = (pages - 1) * page_tokens
    if held < min(longest, page_tokens) or (stated and held < stated):
        wanted = stated or page_tokens
        need = (-(-wanted // page_tokens) + 1) * page_bytes(shape, topology.attn_tp, page_tokens) * ranks
        message = (
            f"the KV cache holds {max(held, 0)} tokens, and one request of {wanted} needs {need >> 20} MiB on this host: "
            "lower model.max_model_len, or raise engine.kv_pages or engine.memory_fraction"
        )
        raise ModelError(message)
    return KvBudget(pages, page_tokens, min(longest, held))


def _longest(shape: ModelShape, stated: int) -> int:
    if stated > shape.context_limit:
        why = "positions" if shape.context_limit == shape.max_position else "tokens of attention window"
        message = f"model.max_model_len: {stated} is more than the model's {shape.context_limit} {why}"
        raise ModelError(message)
    return stated or shape.context_limit


def free_memory() -> int:
    """Bytes that this process may still take: the kernel's estimate, and the control group's limit if that is lower."""
    free = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    left = _cgroup_left()
    return free if left is None else min(free, left)


def _cgroup_left(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            bound, current = (root / limit).read_text(encoding="ascii"), (root / used).read_text(encoding="ascii")
        except OSError:
            continue
        return max(0, int(bound) - int(current)) if bound.strip().isdigit() else None
    return None
