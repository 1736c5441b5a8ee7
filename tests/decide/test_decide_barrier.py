"""The barrier's state machine: what it releases, and what it ignores; then whole runs with losses and respawns."""

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.decide import barrier
from edgemesh.decide.barrier import Rule
from edgemesh.topology import parse, resolve
from edgemesh.topology.config import MAX_CHUNK_TOKENS, MAX_SLOTS
from edgemesh.wire.ids import MAX_RANKS, MAX_TOKENS, Layout, Plane
from edgemesh.wire.messages import Arrive, Release, Resume, Shape

BUSY = Shape(5, 2, 100)
IDLE = Shape()


def arrival(group, tick=0, revision=1, *, shape=BUSY, plane=Plane.PREFILL, epoch=0):
    return Arrive(plane, epoch, tick, group, revision, shape)


PLAIN = Rule()


def fresh(groups=2, rule=PLAIN, plane=Plane.PREFILL):
    return barrier.start(plane, 0, range(groups), rule)


def feed(state, *events, now=0):
    releases = []
    for event in events:
        state, new = (barrier.resume if isinstance(event, Resume) else barrier.arrive)(state, event, now)
        releases += new
    return state, releases


def test_a_tick_is_released_when_all_have_arrived_and_one_has_work():
    state, releases = feed(fresh(3), arrival(0), arrival(2, shape=IDLE))
    assert releases == []
    state, (release,) = feed(state, arrival(1))
    assert (release.tick, release.verdict.tokens) == (0, (5, 5, 0))
    assert state.tick == 1
    assert state.arrivals == (None, None, None)


def test_all_idle_releases_nothing_until_one_replaces_its_arrival():
    state, releases = feed(fresh(3), *(arrival(group, shape=IDLE) for group in range(3)))
    assert releases == []
    state, (release,) = feed(state, arrival(1, revision=2))
    assert release.verdict.tokens == (0, 5, 0)


def test_only_a_higher_revision_of_the_open_tick_of_this_epoch_and_plane_counts():
    state, _ = feed(fresh(), arrival(0, revision=3))
    for event in (
        arrival(0, revision=3, shape=Shape(9)),
        arrival(0, revision=2, shape=Shape(9)),
        arrival(1, epoch=1),
        arrival(1, plane=Plane.DECODE),
        arrival(7),
    ):
        assert feed(state, event) == (state, [])
    state, (release,) = feed(state, arrival(1))
    assert release.verdict.tokens == (5, 5)
    assert feed(state, arrival(0, revision=9)) == (state, []), "the tick is over"


def test_a_group_alone_is_released_at_once():
    state, (release,) = feed(fresh(1), arrival(0))
    assert release.verdict.tokens == (5,)
    assert feed(state, arrival(0, tick=1, shape=IDLE))[1] == []


def test_holding_waits_for_idle_groups_and_no_longer():
    rule = Rule(hold_ns=1000)
    state, releases = feed(fresh(2, rule), arrival(0, shape=IDLE), arrival(1), now=50)
    assert releases == []
    assert barrier.deadline(state) == 1050
    assert barrier.tick(state, 1049) == (state, [])
    held, (release,) = barrier.tick(state, 1050)
    assert release.verdict.tokens == (0, 5)
    assert release.verdict.hold == "held 1000 ns for groups [0]"
    assert barrier.deadline(held) is None
    _, (early,) = feed(state, arrival(0, revision=2), now=60)
    assert early.verdict.tokens == (5, 5)


def test_a_group_that_owes_its_arrival_is_named_with_the_time_since_when_it_is_awaited():
    state, _ = feed(fresh(4), arrival(1, shape=IDLE), now=5)
    assert barrier.holding(state) is None, "nobody waits for anything"
    state, _ = feed(state, arrival(0), now=70)
    state, _ = feed(state, arrival(2), now=90)
    late = barrier.holding(state)
    assert (late.tick, late.groups, late.since_ns) == (0, (3,), 70)


@pytest.mark.parametrize(
    ("plane", "shapes", "rule", "expected"),
    [
        (Plane.DECODE, (Shape(3, graph=True), IDLE), Rule(2, (1, 3, 8)), (Layout.EVEN, 4, True)),
        (Plane.DECODE, (Shape(9, graph=True), Shape(1)), Rule(2, (1, 8)), (Layout.EVEN, 10, False)),
        (Plane.DECODE, (Shape(3), Shape(3, graph=True)), Rule(1, (4,)), (Layout.EVEN, 4, False)),
        (Plane.PREFILL, (Shape(8192), IDLE, IDLE), Rule(4), (Layout.RAGGED, 0, False)),
        (Plane.PREFILL, (Shape(100), Shape(90)), Rule(3), (Layout.EVEN, 102, False)),
        (Plane.PREFILL, (Shape(100), Shape(70)), Rule(3), (Layout.RAGGED, 0, False)),
        (Plane.PREFILL, (Shape(7),), Rule(4), (Layout.EVEN, 8, False)),
        (Plane.MIXED, (Shape(2, graph=True), IDLE), Rule(1, (4,)), (Layout.EVEN, 4, True)),
        (Plane.MIXED, (Shape(2, graph=True), Shape(50)), Rule(1, (4, 64)), (Layout.RAGGED, 0, False)),
    ],
)
def test_layouts(plane, shapes, rule, expected):
    made = barrier.verdict(shapes, plane, rule)
    assert (made.layout, made.bucket, made.graph) == expected
    assert made.tokens == tuple(shape.tokens for shape in shapes)


@given(
    tokens=st.lists(st.integers(0, 5000), min_size=1, max_size=16).filter(any),
    attn_tp=st.integers(1, 8),
    plane=st.sampled_from(Plane),
    graph=st.booleans(),
    slots=st.integers(1, 512),
)
@settings(deadline=None)
def test_padding_holds_everyone_and_costs_little(tokens, attn_tp, plane, graph, slots):
    rule = Rule(attn_tp, barrier.buckets(slots))
    made = barrier.verdict([Shape(each, graph=graph) for each in tokens], plane, rule)
    if made.layout is Layout.RAGGED:
        assert made.bucket == 0
        assert plane is not Plane.DECODE
        assert sum(tokens) < 0.9 * len(tokens) * max(tokens)
    else:
        assert made.bucket >= max(tokens)
        assert made.bucket % attn_tp == 0
        assert made.bucket < max(tokens) * 1.5 + attn_tp
    assert not made.graph or (graph and max(tokens) <= slots)


def test_the_rule_follows_from_the_topology():
    text = (
        "[mesh]\ntp = 4\ndp = 2\nattn_tp = 2\n[barrier]\nhold_ms = 2.5\n[decode]\nslots = 4\n[engine]\ndevice = '{}'\n"
    )
    cuda, cpu = (resolve(parse(text.format(device))) for device in ("cuda", "cpu"))
    assert barrier.rule_for(cuda, Plane.DECODE) == Rule(2, (1, 2, 3, 4), 0)
    assert barrier.rule_for(cuda, Plane.PREFILL) == Rule(2, (), 2_500_000)
    assert barrier.rule_for(cpu, Plane.DECODE) == Rule(2, (), 0)


def test_a_respawned_barrier_sends_the_highest_release_again_unchanged():
    state, (release,) = feed(fresh(), arrival(0), arrival(1))
    empty = fresh()
    # Group 0 was reached, group 1 was not: it still waits for tick 0.
    state, again = feed(empty, Resume(0, Plane.PREFILL, 0, arrival(0, tick=1), release))
    assert again == [release]
    state, again = feed(state, Resume(1, Plane.PREFILL, 0, arrival(1), None))
    assert again == [release], "the group that lags gets it, and its old arrival decides nothing"
    state, (following,) = feed(state, arrival(1, tick=1))
    assert following.tick == 1


class Crowd:
    """Scripted groups around one barrier, over FIFO links with losses at a respawn."""

    def __init__(self, groups, seed):
        self.random = Random(seed)
        self.groups = groups
        self.state = fresh(groups)
        self.work = [self.random.randrange(4) for _ in range(groups)]
        self.tick = [0] * groups
        self.sent = [None] * groups
        self.last = [None] * groups
        self.up = [deque() for _ in range(groups)]
        self.down = [deque() for _ in range(groups)]
        self.ran = [[] for _ in range(groups)]
        for group in range(groups):
            self.arrive(group)

    def arrive(self, group):
        before = self.sent[group]
        again = before is not None and before.tick == self.tick[group]
        shape = Shape(self.random.randrange(1, 99)) if self.work[group] else IDLE
        if again and (before.shape.tokens or not shape.tokens):
            return
        self.sent[group] = arrival(group, self.tick[group], before.revision + 1 if again else 0, shape=shape)
        self.up[group].append(self.sent[group])
        if self.random.random() < 0.2:
            self.up[group].append(self.sent[group])

    def deliver(self, release):
        for line in self.down:
            line.append(release)

    def step(self):
        kind = self.random.random()
        group = self.random.randrange(self.groups)
        if kind < 0.45 and self.up[group]:
            event = self.up[group].popleft()
            self.state, releases = (barrier.resume if isinstance(event, Resume) else barrier.arrive)(
                self.state, event, 0
            )
            for release in releases:
                self.deliver(release)
        elif kind < 0.9 and self.down[group]:
            self.run(group, self.down[group].popleft())
        elif kind < 0.92:
            self.work[group] += self.random.randrange(3)
            self.arrive(group)
        elif kind < 0.93:
            self.respawn()

    def run(self, group, release: Release):
        if release.tick < self.tick[group]:
            assert release == self.ran[group][release.tick], "one tick with two verdicts"
            return
        assert release.tick == self.tick[group], "ticks are consecutive"
        offered = release.verdict.tokens[group]
        assert offered in {0, self.sent[group].shape.tokens}
        self.work[group] -= bool(offered)
        self.ran[group].append(release)
        self.last[group] = release
        self.tick[group] += 1
        self.arrive(group)

    def respawn(self):
        """What was under way in either direction is lost with the old barrier."""
        self.state = fresh(self.groups)
        for group in range(self.groups):
            self.up[group].clear()
            self.down[group].clear()
            self.up[group].append(Resume(group, Plane.PREFILL, 0, self.sent[group], self.last[group]))


@given(groups=st.integers(1, 16), seed=st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_every_group_runs_the_same_ticks_through_losses_and_respawns(groups, seed):
    crowd = Crowd(groups, seed)
    for _ in range(600):
        crowd.step()
    for _ in range(400 * groups):  # no more losses: everything that was wanted must run
        kind = crowd.random.randrange(groups)
        if crowd.up[kind]:
            event = crowd.up[kind].popleft()
            crowd.state, releases = (barrier.resume if isinstance(event, Resume) else barrier.arrive)(
                crowd.state, event, 0
            )
            for release in releases:
                crowd.deliver(release)
        if crowd.down[kind]:
            crowd.run(kind, crowd.down[kind].popleft())
    assert crowd.work == [0] * groups, "work is left, and nothing moves"
    longest = max(crowd.ran, key=len)
    for ran in crowd.ran:
        assert ran == longest
    assert [release.tick for release in longest] == list(range(len(longest)))
    assert all(any(release.verdict.tokens) for release in longest), "an all-idle tick ran"


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.integers(0, 4096),
    tick=st.integers(0, 5),
    plane=st.sampled_from(list(Plane)),
    attn_tp=st.integers(1, 8),
    buckets=st.sampled_from([(), (1, 2, 4, 8, 64, 256)]),
    graph=st.booleans(),
)
def test_a_lone_group_gets_what_the_machine_would_say(tokens, tick, plane, attn_tp, buckets, graph):
    rule = barrier.Rule(attn_tp, buckets)
    event = Arrive(plane, 0, tick, 0, 1, Shape(tokens, tokens, tokens, graph))
    state = barrier.start(plane, 0, [0], rule)
    for number in range(tick):
        state, _ = barrier.arrive(state, Arrive(plane, 0, number, 0, 1, Shape(1, 1, 1)), 0)
    _, releases = barrier.arrive(state, event, 0)
    assert ([] if (release := barrier.alone(event, rule)) is None else [release]) == releases


@settings(deadline=None)
@given(
    attn_tp=st.integers(1, MAX_RANKS),
    chunk=st.integers(MAX_CHUNK_TOKENS - 300, MAX_CHUNK_TOKENS),
    rows=st.integers(MAX_SLOTS - 300, MAX_SLOTS),
    plane=st.sampled_from(Plane),
    graph=st.booleans(),
)
def test_the_largest_step_that_a_topology_allows_can_be_padded(attn_tp, chunk, rows, plane, graph):
    rule = Rule(attn_tp, barrier.buckets(MAX_SLOTS) if graph else ())
    tokens = {Plane.PREFILL: chunk, Plane.DECODE: rows, Plane.MIXED: chunk + rows}[plane]
    made = barrier.verdict([Shape(tokens, 1, 1, graph=graph)], plane, rule)
    assert tokens <= made.bucket <= MAX_TOKENS
    assert made.bucket % attn_tp == 0
