"""Collectives over ``torch.distributed`` gloo process groups, made one by one from a store: there is no default group.

Sums are not left to gloo: parts are exchanged and added here, in rank order and float32, as in every other backend.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore, ProcessGroupGloo, Store

from edgemesh.engine.collectives import CollectiveTimeoutError, Deadline, parts, sum_ranks

_ROLL_CALL_S: Final = 1.0
"""After a failure the ranks that are there say so; who has not by then is missing."""


class GlooBackend:
    """One rank's end of a group; ``store`` is shared by its ranks and by nothing else (its prefix holds the epoch)."""

    pads = True

    def __init__(self, name: str, rank: int, size: int, store: Store, host: str, deadline: Deadline) -> None:
        self._name, self._rank, self._size, self._deadline = name, rank, size, deadline
        self._store = PrefixStore(f"roll-{name}", store)
        self._number = 0
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - torch has no public way
        options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]  # noqa: SLF001
        options._timeout = timedelta(seconds=deadline.left_s)  # noqa: SLF001
        self._group = self._guard(lambda: ProcessGroupGloo(PrefixStore(name, store), rank, size, options))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Reduce-scatter and all-gather of even parts."""
        flat = x.reshape(-1)
        shares = parts(len(flat), self._size)
        return self.all_gather(self.reduce_scatter(flat, shares), shares).view_as(x)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Each rank is sent its rows by all, and adds them."""
        mine = counts[self._rank]
        received = x.new_empty((mine * self._size, *x.shape[1:]))
        self._exchange(received, x, [mine] * self._size, list(counts))
        return sum_ranks(received.view(self._size, mine, *x.shape[1:]).unbind(0))

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows to every rank: exact counts cost exactly what they are."""
        received = x.new_empty((sum(counts), *x.shape[1:]))
        sent = x.repeat(self._size, *(1,) * (x.dim() - 1))
        self._exchange(received, sent, list(counts), [len(x)] * self._size)
        return received

    def gather(self, x: Tensor) -> Tensor:
        """Small equal tensors."""
        return self.all_gather(x[None], [1] * self._size)

    def _exchange(self, received: Tensor, sent: Tensor, receives: list[int], sends: list[int]) -> None:
        self._number += 1

        def run() -> None:
            options = AllToAllOptions()
            options.timeout = timedelta(seconds=self._deadline.left_s)
            self._group.alltoall_base(received, sent.contiguous(), receives, sends, options).wait()

        self._guard(run)

    def _guard(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - passes on what the work returns
        try:
            return work()
        except RuntimeError as error:
            raise CollectiveTimeoutError(self._name, self._roll_call()) from error

    def _roll_call(self) -> list[int]:
        """Ranks that did not come to this collective, nor to its failure."""
        keys = [f"{self._number}-{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], "here")
        until = time.monotonic() + _ROLL_CALL_S
        missing = list(range(self._size))
        while missing and time.monotonic() < until:
            missing = [rank for rank in missing if not self._store.check([keys[rank]])]
            time.sleep(0.01)
        return missing
