"""Where the time of many requests went: by phase, by group, and by rank. Pure, over timelines and ticks."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from edgemesh.inspect.facts import Category, Tick, Timeline


class PhaseShare(msgspec.Struct, frozen=True):
    """One category, summed over the requests; ``worst`` is the request that had most of it."""

    category: Category
    total_ns: int
    share: float
    requests: int
    worst: str
    worst_ns: int


class GroupBlame(msgspec.Struct, frozen=True):
    """A group in the ticks of its coupled set: how often, and for how long, its peers waited for it.

    ``waited_ns`` is what it waited for others at the barrier; ``caused_ns`` what its peers waited in ticks at which
    it arrived last.
    """

    plane: str
    group: int
    ticks: int
    last: int
    caused_ns: int
    waited_ns: int


class RankBlame(msgspec.Struct, frozen=True):
    """A rank in the ticks of its coupled set: how often it had the most work of its own.

    ``behind_ns`` is by how much it exceeded the mean of the tick's ranks in the ticks in which it was the slowest.
    """

    plane: str
    rank: str
    ticks: int
    slowest: int
    own_ns: int
    collective_ns: int
    behind_ns: int


class Blame(msgspec.Struct, frozen=True):
    """All three views, each with the largest share first."""

    requests: int
    e2e_ns: int
    phases: tuple[PhaseShare, ...]
    groups: tuple[GroupBlame, ...]
    ranks: tuple[RankBlame, ...]


def blame(timelines: Sequence[Timeline], ticks: Iterable[Tick]) -> Blame:
    """Add up the timelines of requests and the ticks that they lived through; idle ticks count for no one."""
    real = [tick for tick in ticks if not tick.idle and tick.done is not None]
    return Blame(
        requests=len(timelines),
        e2e_ns=sum(timeline.e2e_ns for timeline in timelines),
        phases=_phases(timelines),
        groups=_groups(real),
        ranks=_ranks(real),
    )


def _phases(timelines: Sequence[Timeline]) -> tuple[PhaseShare, ...]:
    whole = sum(timeline.e2e_ns for timeline in timelines) or 1
    shares = []
    for category in Category:
        parts = [(timeline.totals[category], timeline.request) for timeline in timelines if category in timeline.totals]
        if parts:
            total, (worst_ns, worst) = sum(ns for ns, _ in parts), max(parts)
            shares.append(PhaseShare(category, total, total / whole, len(parts), worst, worst_ns))
    return tuple(sorted(shares, key=lambda share: -share.total_ns))


def _groups(ticks: Sequence[Tick]) -> tuple[GroupBlame, ...]:
    count: Counter[tuple[str, int]] = Counter()
    last: Counter[tuple[str, int]] = Counter()
    caused: Counter[tuple[str, int]] = Counter()
    waited: Counter[tuple[str, int]] = Counter()
    for tick in ticks:
        key = tick.plane, tick.group
        count[key] += 1
        waited[key] += tick.barrier_ns
        if tick.last == tick.group:
            last[key] += 1
        elif tick.last is not None:
            caused[tick.plane, tick.last] += tick.barrier_ns
    keys = sorted(count.keys() | caused.keys(), key=lambda key: (-caused[key], key))
    return tuple(GroupBlame(*key, count[key], last[key], caused[key], waited[key]) for key in keys)


def _ranks(ticks: Iterable[Tick]) -> tuple[RankBlame, ...]:
    sums: dict[tuple[str, str], Counter[str]] = {}
    seen: set[tuple[int, int, str, int, str]] = set()
    for tick in ticks:
        # Every group of a coupled set holds the same steps: each rank's counts once per tick.
        key = tick.run, tick.epoch, tick.plane, tick.tick
        fresh = [step for step in tick.steps if (*key, step.rank) not in seen]
        seen.update((*key, step.rank) for step in fresh)
        slowest = tick.slowest
        mean = sum(step.own_ns for step in tick.steps) // len(tick.steps) if tick.steps else 0
        for step in fresh:
            total = sums.setdefault((tick.plane, step.rank), Counter())
            total.update(ticks=1, own=step.own_ns, collective=step.collective_ns)
            if step is slowest and len(tick.steps) > 1:
                total.update(slowest=1, behind=step.own_ns - mean)
    found = [
        RankBlame(*key, total["ticks"], total["slowest"], total["own"], total["collective"], total["behind"])
        for key, total in sums.items()
    ]
    return tuple(sorted(found, key=lambda rank: (-rank.behind_ns, -rank.own_ns, rank.rank)))
