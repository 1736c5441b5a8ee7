"""The order of waiting requests: fair between keys, bounded in age.

Deficit round robin over tokens (Shreedhar and Varghese, 1995): each key in turn may take as many tokens as its quantum has
saved up, so a key that sends long prompts gets no more than one that sends short ones. Two things stand before the round:
preempted requests, oldest first, and any request older than the ageing bound.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator

from edgemesh.decide.request import Sequence, State


class FairQueue:
    """Waiting requests; ``peek`` says who is next, and ``remove`` takes anyone out.

    ``quantum`` is in tokens per round and key, ``age_ns`` how long a request may be passed over by fairness.
    """

    def __init__(self, quantum: int, age_ns: int) -> None:
        self.quantum = quantum
        self.age_ns = age_ns
        self._returned: list[Sequence] = []
        self._keys: dict[str, list[Sequence]] = {}
        self._ring: deque[str] = deque()
        self._saved: dict[str, int] = {}
        self._by_age: deque[Sequence] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returned
        for line in self._keys.values():
            yield from line

    def add(self, sequence: Sequence) -> None:
        """A new request goes to the end of its key's line (among equals of its priority)."""
        key = sequence.submit.key
        if key not in self._keys:
            self._keys[key] = []
            self._ring.append(key)
            self._saved[key] = 0
        insort(self._keys[key], sequence, key=_rank)
        self._by_age.append(sequence)
        self._size += 1

    def give_back(self, sequence: Sequence) -> None:
        """A preempted request returns before all new ones, the oldest of them first."""
        insort(self._returned, sequence, key=lambda each: each.order)
        self._size += 1

    def peek(self, now_ns: int) -> Sequence | None:
        """Who is admitted next; asking again without a change gives the same answer."""
        if self._returned:
            return self._returned[0]
        if not self._ring:
            return None
        while self._by_age[0].state is not State.WAITING or self._by_age[0].life:
            self._by_age.popleft()
        oldest = self._by_age[0]
        if now_ns - oldest.arrived_ns > self.age_ns:
            return oldest
        head = self._keys[self._ring[0]][0]
        turned = 0
        while self._saved[self._ring[0]] < len(head.tokens):
            if turned == len(self._ring):
                self._skip_rounds()
                turned = 0
            turned += 1
            self._ring.rotate(-1)
            self._saved[self._ring[0]] += self.quantum
            head = self._keys[self._ring[0]][0]
        return head

    def _skip_rounds(self) -> None:
        """Save up for all the rounds at once in which no key could take its first request."""
        least = min(len(line[0].tokens) - self._saved[key] for key, line in self._keys.items())
        rounds = -(-least // self.quantum) - 1
        if rounds > 0:
            for key in self._saved:
                self._saved[key] += rounds * self.quantum

    def remove(self, sequence: Sequence) -> None:
        """Take a request out, because it is admitted or has ended."""
        self._size -= 1
        if sequence in self._returned:
            self._returned.remove(sequence)
            return
        key = sequence.submit.key
        line = self._keys[key]
        line.remove(sequence)
        self._saved[key] = max(0, self._saved[key] - len(sequence.tokens))
        if not line:
            del self._keys[key], self._saved[key]
            self._ring.remove(key)
        if not self._keys:
            self._by_age.clear()


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.submit.priority, sequence.order
