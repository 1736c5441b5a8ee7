"""Decode steps as captured CUDA graphs: one for each padded batch size, and for small batches one for each width of block table.

Which batch size runs is the verdict's choice, so that all ranks of a coupled set replay the same collectives. Widths concern
a rank's own attention alone.
"""

from collections.abc import Callable, Sequence

import torch


class Graphs:
    """Every decode step that can be asked for, ready to replay.

    ``body(rows, pages)`` issues one step of so many rows over block tables of so many pages; ``widths(rows)`` lists the tables wanted,
    ascending, the last of them wide enough for any row.
    """

    def __init__(
        self, sizes: Sequence[int], widths: Callable[[int], Sequence[int]], body: Callable[[int, int], None]
    ) -> None:
        self.sizes = frozenset(sizes)
        self._widths = {rows: tuple(widths(rows)) for rows in self.sizes}
        self._body = body
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def capture(self) -> int:
        """Run each step once and record it, largest first, in memory that all share; returns how many there are."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        for rows in sorted(self.sizes, reverse=True):
            for pages in reversed(self._widths[rows]):
                self._body(rows, pages)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self._body(rows, pages)
                self._graphs[rows, pages] = graph
        return len(self._graphs)

    def replay(self, rows: int, pages: int) -> None:
        """Enqueue the step of ``rows`` whose block tables hold at least ``pages``."""
        width = next(width for width in self._widths[rows] if width >= pages)
        self._graphs[rows, width].replay()
