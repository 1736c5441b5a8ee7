"""The queue of waiting requests: its order is that of the rounds it does not run one by one."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.decide.queue import FairQueue
from edgemesh.decide.request import Sequence
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Sampling, Submit

HOUR_NS = 3_600_000_000_000


def waiting(order: int, key: str, tokens: int, priority: int = 0) -> Sequence:
    submit = Submit(f"r{order}", 0, 0, TokenArray(bytes(4 * tokens)), Sampling(), 1, key=key, priority=priority)
    return Sequence(submit, order, 0)


class Naive:
    """Deficit round robin as its authors wrote it: every round is run."""

    def __init__(self, quantum: int) -> None:
        self.quantum, self.ring, self.lines, self.saved = quantum, deque(), {}, {}

    def add(self, sequence: Sequence) -> None:
        key = sequence.submit.key
        if key not in self.lines:
            self.ring.append(key)
            self.lines[key], self.saved[key] = [], 0
        self.lines[key].append(sequence)

    def take(self) -> Sequence:
        while self.saved[self.ring[0]] < len(self.lines[self.ring[0]][0].tokens):
            self.ring.rotate(-1)
            self.saved[self.ring[0]] += self.quantum
        key = self.ring[0]
        sequence = self.lines[key].pop(0)
        self.saved[key] = max(0, self.saved[key] - len(sequence.tokens))
        if not self.lines[key]:
            del self.lines[key], self.saved[key]
            self.ring.remove(key)
        return sequence


@settings(max_examples=200, deadline=None)
@given(
    quantum=st.integers(1, 40),
    asked=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 300)), min_size=1, max_size=20),
    takes=st.lists(st.integers(0, 3), max_size=20),
)
def test_skipping_rounds_changes_no_ones_turn(quantum, asked, takes):
    queue, naive = FairQueue(quantum, HOUR_NS), Naive(quantum)
    left, pace = 0, [*takes, *[1] * len(asked)]
    order, expected = [], []
    for number, ((key, tokens), count) in enumerate(zip(asked, pace, strict=False)):
        sequence = waiting(number, key, tokens)
        queue.add(sequence)
        naive.add(sequence)
        left += 1
        for _ in range(min(count, left)):
            left -= 1
            found = queue.peek(1)
            assert queue.peek(1) is found
            queue.remove(found)
            order.append(found.order)
            expected.append(naive.take().order)
    assert order == expected


class Counted(deque):
    turns = 0

    def rotate(self, count: int = 1) -> None:
        Counted.turns += 1
        super().rotate(count)


def test_long_prompts_and_a_quantum_of_one_token_take_no_more_turns_than_keys():
    queue = FairQueue(1, HOUR_NS)
    keys = 50
    for order in range(keys):
        queue.add(waiting(order, str(order), (1 << 20) - order))
    queue._ring = Counted(queue._ring)
    for _ in range(keys):
        queue.remove(queue.peek(1))
    assert Counted.turns <= 2 * keys * keys


@given(priorities=st.lists(st.integers(-1000, 1000), min_size=1, max_size=12))
def test_of_one_key_the_lowest_priority_goes_first_and_equals_in_order(priorities):
    queue = FairQueue(1000, HOUR_NS)
    for order, priority in enumerate(priorities):
        queue.add(waiting(order, "a", 1, priority))
    taken = []
    while (sequence := queue.peek(0)) is not None:
        queue.remove(sequence)
        taken.append((sequence.submit.priority, sequence.order))
    assert taken == sorted((priority, order) for order, priority in enumerate(priorities))
