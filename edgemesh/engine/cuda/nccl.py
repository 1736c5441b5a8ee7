"""Collectives of ranks on cards: NCCL communicators made one by one from a store; there is no default group.

Every operation goes to the stream that is current, so it can be captured in a graph, and no host thread waits in it. What
waits is ``settle``, until a deadline: NCCL's kernels would spin for ever for a rank that does not come.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    PrefixStore,
    ReduceScatterOptions,
    Store,
)

from edgemesh.engine.collectives import Backend, CollectiveError, Collectives, CollectiveTimeoutError, Deadline, starts
from edgemesh.wire.ids import Plane

PREFILL_CHANNELS: Final = 2
"""Channels of the plane that must leave the link to the other, where cards reach each other through the host's memory only."""

PREFLIGHT_S: Final = 90.0
"""How long communicators may take to come up and to show that they add."""

PROBE_BYTES: Final = (4 << 10, 16 << 20)
"""What is added to try a communicator: little, and enough to use every channel and protocol for large tensors."""

REMEDY: Final = (
    "Usual remedies: NCCL_P2P_DISABLE=1 in the environment (cards that claim to read each other's memory and cannot; also with an IOMMU on), "
    "more shared memory (docker: --ipc=host or --shm-size=1g), NCCL_DEBUG=INFO to see what NCCL says"
)

_ROLL_CALL_S: Final = 2.0
"""After a failure the ranks that are there say so; who has not by then is missing."""

_SPIN_NS: Final = 200_000
"""How long a wait polls without a pause: a step's end is worth a core for so long."""

_PAUSE_S: Final = 50e-6

_NO_WATCHDOG: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""torch's own watchdog ends the process without a word to the supervisor; waits are bounded here instead."""


T = TypeVar("T")


class CommunicatorError(CollectiveError):
    """A communicator that does not come up, or does not add up."""


class NcclBackend:
    """One rank's end of a group on its card; ``store`` is shared by its ranks and by nothing else (its prefix holds the epoch)."""

    pads = True

    def __init__(self, name: str, rank: int, size: int, store: Store, device: torch.device, channels: int = 0) -> None:
        self.name, self._rank, self._size, self._device = name, rank, size, device
        self._store = PrefixStore(f"roll-{name}", store)
        for key, value in _NO_WATCHDOG.items():
            os.environ.setdefault(key, value)
        nccl = _process_group_class()
        options = nccl.Options(is_high_priority_stream=False)
        options._timeout = timedelta(days=1)  # noqa: SLF001 - torch has no public way; ``settle`` bounds waits
        if channels:
            options.config.max_ctas = channels
            options.config.min_ctas = 1
        self._group: Any = nccl(PrefixStore(name, store), rank, size, options)
        self._reduce = AllreduceOptions()
        self._scatter = ReduceScatterOptions()
        self._gather = AllgatherOptions()
        for each in (self._reduce, self._scatter, self._gather):
            each.asyncOp = False  # on the current stream, with nothing to wait for

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum, in the place of ``x`` where it is contiguous."""
        summed = x.contiguous()
        self._group.allreduce([summed], self._reduce)
        return summed

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's rows of the sum; unequal counts are one reduction for each rank, issued together."""
        out = x.new_empty((counts[self._rank], *x.shape[1:]))
        whole = x.contiguous()
        if _equal(counts):
            self._group._reduce_scatter_base(out, whole, self._scatter)  # noqa: SLF001 - torch's name for it
        else:
            self._group.reduce_scatter([out], [_dealt(whole, counts)], self._scatter)
        return out

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Every rank's rows; unequal counts are one broadcast for each rank, issued together."""
        out = x.new_empty((sum(counts), *x.shape[1:]))
        mine = x.contiguous()
        if _equal(counts):
            self._group._allgather_base(out, mine, self._gather)  # noqa: SLF001 - torch's name for it
        else:
            self._group.allgather([_dealt(out, counts)], [mine], self._gather)
        return out

    def gather(self, x: Tensor) -> Tensor:
        """``[size, ...]``; a tensor of the host comes back to the host."""
        mine = x.to(self._device).contiguous()
        out = mine.new_empty((self._size, *x.shape))
        self._group._allgather_base(out.view(-1), mine.view(-1), self._gather)  # noqa: SLF001
        return out.to(x.device)

    def prove(self) -> None:
        """Add, and gather, what every rank knows the outcome of. Raises ``CommunicatorError`` if it is another."""
        rank, size = self._rank, self._size
        for nbytes in PROBE_BYTES:
            pattern = torch.arange(nbytes // 4, device=self._device, dtype=torch.float32).remainder_(251)
            summed = self.all_reduce(pattern + rank)
            wrong = int((summed != pattern * size + size * (size - 1) // 2).sum())
            if wrong:
                message = (
                    f"group {self.name!r}: {wrong} of {len(pattern)} sums over {size} ranks are wrong: "
                    f"the cards corrupt what they exchange. {REMEDY}"
                )
                raise CommunicatorError(message)
        found = self.gather(torch.tensor([rank])).flatten().tolist()
        if found != list(range(size)):
            message = f"group {self.name!r}: what ranks {found} sent came in the places of 0 to {size - 1}. {REMEDY}"
            raise CommunicatorError(message)

    def give_up(self) -> CollectiveError:
        """End all that runs in the communicator; the error that names who is missing."""
        self._store.set(f"{self._rank}", "here")
        until = time.monotonic() + _ROLL_CALL_S
        missing = list(range(self._size))
        while missing and time.monotonic() < until:
            missing = [rank for rank in missing if not self._store.check([f"{rank}"])]
            time.sleep(0.01)
        self._group.abort()
        if missing:
            return CollectiveTimeoutError(self.name, missing)
        return CommunicatorError(f"collective of group {self.name!r}: all ranks came, and it did not end. {REMEDY}")


def maker(
    plane: Plane, prefixes: Mapping[str, str], store: Store, deadline: Deadline
) -> Callable[[str, int, int], Backend]:
    """What makes a rank's groups on the card that it uses; ``prefixes`` are the groups' names in the store.

    Each is tried before it is handed out. Raises ``CommunicatorError``.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    channels = channels_of(plane, peers=_peers(), environment=os.environ)

    def make(name: str, rank: int, size: int) -> Backend:
        def proven() -> NcclBackend:
            torch.cuda.set_device(device)  # which is each thread's own
            backend = NcclBackend(name, rank, size, PrefixStore(prefixes[name], store), device, channels)
            backend.prove()
            torch.cuda.empty_cache()  # what was added to prove it
            return backend

        what = f"the communicator of group {name!r} ({size} ranks, {plane} plane)"
        return within(min(PREFLIGHT_S, deadline.left_s), what, proven)

    return make


def within(seconds: float, what: str, work: Callable[[], T]) -> T:
    """Do work that may hang inside a library, in a thread of its own. Raises ``CommunicatorError`` when time is up."""
    made: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(work())
        except Exception as error:  # noqa: BLE001 - it is raised again in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="preflight", daemon=True)
    thread.start()
    thread.join(seconds)
    if made:
        return made[0]
    if failed and isinstance(failed[0], CommunicatorError):
        raise failed[0]
    if failed:
        message = f"{what} failed: {failed[0]}. {REMEDY}"
        raise CommunicatorError(message) from failed[0]
    message = f"{what} did not come up and add within {seconds:.0f} s. {REMEDY}"
    raise CommunicatorError(message)


class Event(Protocol):
    """A point in the device's work, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the device has come to it."""


def settle(event: Event, collectives: Collectives) -> None:
    """Return when the device has come to ``event``; at the deadline, end what runs and raise ``CollectiveError``."""
    began = time.monotonic_ns()
    while not event.query():
        if collectives.deadline.passed:
            groups = [collectives.world, *([] if collectives.attn is collectives.world else [collectives.attn])]
            errors = [each.backend.give_up() for each in groups if isinstance(each.backend, NcclBackend)]
            raise next(iter(errors), CollectiveError("a step of a rank that is alone did not end in time"))
        if time.monotonic_ns() - began > _SPIN_NS:
            time.sleep(_PAUSE_S)


def channels_of(plane: Plane, *, peers: bool, environment: Mapping[str, str]) -> int:
    """How many channels a plane's communicators may use; 0 leaves it to NCCL."""
    through_host = not peers or environment.get("NCCL_P2P_DISABLE") == "1"
    return PREFILL_CHANNELS if plane is Plane.PREFILL and through_host else 0


def _peers() -> bool:
    """Whether this card reaches every other one directly."""
    here = torch.cuda.current_device()
    others = [each for each in range(torch.cuda.device_count()) if each != here]
    return all(torch.cuda.can_device_access_peer(here, each) for each in others)


def _dealt(x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The rows of each rank."""
    return [x.narrow(0, begin, count) for begin, count in zip(starts(counts), counts, strict=True)]


def _equal(counts: Sequence[int]) -> bool:
    return len(set(counts)) == 1


def _process_group_class() -> Any:  # noqa: ANN401 - a build of torch without NCCL has no such class
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 - not every build has it
    except ImportError as error:
        message = f"torch {torch.__version__} was built without NCCL, and ranks on several cards need it"
        raise CommunicatorError(message) from error
    return ProcessGroupNCCL
