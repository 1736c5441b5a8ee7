"""The step barrier of one plane of one coupled set: it owns the tick number and the verdict.

Every group arrives for a tick with the shape of the step that it would run. When all have, and one of them has work, the tick
is released to all with one verdict; while all are idle the tick stays open and nothing runs. Arrivals of a tick may be
replaced by a higher revision until its release, so an idle group that gets work needs no wake-up.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from edgemesh.topology import Topology
from edgemesh.wire.ids import MAX_TOKENS, Layout, Plane
from edgemesh.wire.messages import Arrive, Release, Resume, Shape, Verdict

BALANCED: Final = 0.9
"""At least this share of real tokens, and padding costs less than exact counts do."""


class Rule(msgspec.Struct, frozen=True):
    """What the verdict follows, the same for all ticks.

    ``buckets``: padded tokens per group that graphs exist for, ascending. ``hold_ns``: how long a tick that has work waits for groups
    that arrived idle, so that they run together.
    """

    attn_tp: int = 1
    buckets: tuple[int, ...] = ()
    hold_ns: int = 0


class BarrierState(msgspec.Struct, frozen=True):
    """The open tick of one plane; ``arrivals`` and ``came_ns`` follow the order of ``groups``.

    ``last`` is the release before it, kept for groups that may have missed it.
    """

    plane: Plane
    epoch: int
    groups: tuple[int, ...]
    rule: Rule
    tick: int
    arrivals: tuple[Arrive | None, ...]
    came_ns: tuple[int, ...]
    last: Release | None = None


class Holding(msgspec.Struct, frozen=True):
    """Groups that owe an arrival for a tick, and since when another one's work waits for them."""

    tick: int
    groups: tuple[int, ...]
    since_ns: int


def buckets(slots: int) -> tuple[int, ...]:
    """The batch sizes that decode graphs are captured for: dense where batches are small, never more than a third too large.

    >>> buckets(48)
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
    """
    sizes = {slots, *(size for power in range(slots.bit_length()) for size in (1 << power, 3 << power) if size < slots)}
    return tuple(sorted(sizes))


def rule_for(topology: Topology, plane: Plane) -> Rule:
    """The rule of one plane of every coupled set: graphs are for decode on CUDA, holding is for prefill."""
    sizes = buckets(topology.decode.slots) if topology.engine.device == "cuda" and plane is not Plane.PREFILL else ()
    hold_ns = int(topology.barrier.hold_ms * 1e6) if plane is Plane.PREFILL else 0
    return Rule(topology.attn_tp, sizes, hold_ns)


def graph_sizes(rule: Rule) -> tuple[int, ...]:
    """The padded sizes that verdicts of this rule ask graphs for, ascending."""
    return tuple(sorted({_padded(size, rule.attn_tp) for size in rule.buckets}))


def start(plane: Plane, epoch: int, groups: Sequence[int], rule: Rule) -> BarrierState:
    """Tick 0, with nobody there."""
    size = len(groups)
    return BarrierState(plane, epoch, tuple(groups), rule, 0, (None,) * size, (0,) * size)


def alone(event: Arrive, rule: Rule) -> Release | None:
    """What the machine does for a set of one group, which needs no memory: work runs at once, idleness never."""
    if not event.shape.tokens:
        return None
    return Release(event.plane, event.epoch, event.tick, verdict((event.shape,), event.plane, rule))


def arrive(state: BarrierState, event: Arrive, now_ns: int) -> tuple[BarrierState, list[Release]]:
    """Take an arrival; a late or repeated one, or one of another epoch, plane or set, changes nothing."""
    after = _take(state, event, now_ns)
    return (state, []) if after is state else tick(after, now_ns)


def resume(state: BarrierState, event: Resume, now_ns: int) -> tuple[BarrierState, list[Release]]:
    """A group tells a respawned barrier where it stands.

    The highest release that any group saw is adopted and sent again unchanged, before anything is decided: a group
    that was not reached gets it, and the others know it.
    """
    if event.plane is not state.plane or event.epoch != state.epoch or event.group not in state.groups:
        return state, []
    again: list[Release] = []
    seen = event.release
    if seen is not None and seen.epoch == state.epoch and seen.plane is state.plane and seen.tick >= state.tick:
        state = _open(state, seen)
        again = [seen]
    elif state.last is not None and (seen is None or seen.tick < state.last.tick):
        again = [state.last]
    if event.arrive is not None:
        state = _take(state, event.arrive, now_ns)
    state, releases = tick(state, now_ns)
    return state, again + releases


def tick(state: BarrierState, now_ns: int) -> tuple[BarrierState, list[Release]]:
    """Release the open tick if it is due."""
    if not _complete(state):
        return state, []
    until = _held_until(state)
    if until is not None and now_ns < until:
        return state, []
    arrivals = [each for each in state.arrivals if each is not None]
    made = verdict([each.shape for each in arrivals], state.plane, state.rule, _hold(state, now_ns))
    release = Release(state.plane, state.epoch, arrivals[0].tick, made)
    return _open(state, release), [release]


def deadline(state: BarrierState) -> int | None:
    """When ``tick`` must be asked though nothing came, or None."""
    return _held_until(state) if _complete(state) else None


def work_since(state: BarrierState) -> int | None:
    """When the first work for the open tick came, or None."""
    pairs = zip(state.arrivals, state.came_ns, strict=True)
    return min((came for each, came in pairs if each is not None and each.shape.tokens), default=None)


def holding(state: BarrierState) -> Holding | None:
    """Who keeps the open tick from its release: groups that have not arrived while another has work for it."""
    late = tuple(group for group, each in zip(state.groups, state.arrivals, strict=True) if each is None)
    since = work_since(state)
    return Holding(state.tick, late, since) if late and since is not None else None


def verdict(shapes: Sequence[Shape], plane: Plane, rule: Rule, hold: str = "") -> Verdict:
    """How all ranks of the set run one step; a function of nothing but its arguments.

    Decode (and any step that all groups with work want as a graph) is padded to a bucket. Prefill is padded where the groups are balanced,
    else each group sends its exact count: one long chunk must not cost a multiple of it.
    """
    tokens = tuple(shape.tokens for shape in shapes)
    most = max(tokens)
    bucket = next((each for each in rule.buckets if each >= most), 0)
    graph = bucket > 0 and all(shape.graph for shape in shapes if shape.tokens)
    if plane is Plane.DECODE or graph:
        return Verdict(tokens, Layout.EVEN, _padded(bucket or most, rule.attn_tp), graph, hold)
    if sum(tokens) >= BALANCED * len(tokens) * most:
        return Verdict(tokens, Layout.EVEN, _padded(most, rule.attn_tp), graph=False, hold=hold)
    return Verdict(tokens, Layout.RAGGED, 0, graph=False, hold=hold)


def _complete(state: BarrierState) -> bool:
    """Whether all groups wait for one tick, and one of them has work.

    After a respawn that tick may be a later one than the barrier's: all ticks before it are over.
    """
    head = state.arrivals[0]
    if head is None or None in state.arrivals or any(each is None or each.tick != head.tick for each in state.arrivals):
        return False
    return any(each is not None and each.shape.tokens for each in state.arrivals)


def _padded(tokens: int, attn_tp: int) -> int:
    padded = -(-tokens // attn_tp) * attn_tp
    assert padded <= MAX_TOKENS, f"a step of {padded} tokens per group; the most is {MAX_TOKENS}"
    return padded


def _take(state: BarrierState, event: Arrive, now_ns: int) -> BarrierState:
    if event.epoch != state.epoch or event.plane is not state.plane or event.tick < state.tick:
        return state
    if event.group not in state.groups:
        return state
    at = state.groups.index(event.group)
    before = state.arrivals[at]
    if before is not None and (event.tick, event.revision) <= (before.tick, before.revision):
        return state
    came = before is None or before.tick != event.tick or bool(event.shape.tokens) != bool(before.shape.tokens)
    return msgspec.structs.replace(
        state,
        arrivals=(*state.arrivals[:at], event, *state.arrivals[at + 1 :]),
        came_ns=(*state.came_ns[:at], now_ns, *state.came_ns[at + 1 :]) if came else state.came_ns,
    )


def _open(state: BarrierState, release: Release) -> BarrierState:
    """The tick after ``release``, with the arrivals that are already for it."""
    number = release.tick + 1
    kept = tuple(each if each is not None and each.tick >= number else None for each in state.arrivals)
    return msgspec.structs.replace(state, tick=number, arrivals=kept, last=release)


def _held_until(state: BarrierState) -> int | None:
    if not state.rule.hold_ns or all(each is None or each.shape.tokens for each in state.arrivals):
        return None
    since = work_since(state)
    return None if since is None else since + state.rule.hold_ns


def _hold(state: BarrierState, now_ns: int) -> str:
    since = work_since(state)
    if not state.rule.hold_ns or since is None or now_ns <= since:
        return ""
    idle = [group for group, each in zip(state.groups, state.arrivals, strict=True) if each and not each.shape.tokens]
    return f"held {now_ns - since} ns for groups {idle}" if idle else f"held {now_ns - since} ns"
