from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.inspect import terminal, waterfall
from edgemesh.inspect.facts import Category, Event, Step, Tick
from edgemesh.inspect.timeline import RUNNING, TickIndex, build, ran, reason, waited_for

MS = 1_000_000

NAMES = [
    ("gateway-0", "request.received"),
    ("gateway-0", "request.tokenised"),
    ("gateway-0", "request.submitted"),
    ("gateway-0", "request.accepted"),
    ("router-0", "request.placed"),
    ("router-0", "request.rejected"),
    ("group-1", "request.queued"),
    ("group-1", "request.admitted"),
    ("group-1", "request.prefilled"),
    ("group-1", "request.joined"),
    ("group-1", "request.preempted"),
    ("group-1", "request.finished"),
    ("group-1", "request.aborted"),
    ("gateway-0", "request.first_token"),
    ("gateway-0", "request.sent"),
    ("gateway-0", "request.finished"),
    ("gateway-0", "request.failed"),
    ("gateway-0", "request.aborted"),
    ("rank-0.decode", "unheard.of"),
]

times = st.integers(0, 300)
events = st.builds(
    lambda name, at, tick: Event(at, name[0], name[1], group=1 if name[0] == "group-1" else None, tick=tick),
    st.sampled_from(NAMES),
    times,
    st.none() | st.integers(0, 20),
)
ticks = st.builds(
    Tick,
    group=st.integers(0, 1),
    plane=st.sampled_from(["prefill", "decode", "mixed"]),
    tick=st.integers(0, 20),
    arrive=st.none() | times,
    plan=st.none() | times,
    done=st.none() | times,
    idle=st.booleans(),
    hold=st.sampled_from(["", "", "together"]),
    requests=st.sampled_from([(), ("r",), ("other",), ("r", "other")]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(events, min_size=1, max_size=25), st.lists(ticks, max_size=25), times)
def test_every_nanosecond_belongs_to_exactly_one_category_whatever_was_traced(happened, stepped, now):
    timeline = build("r", happened, TickIndex(stepped), now)
    at = timeline.start
    for span in timeline.spans:
        assert span.start == at
        assert span.end > span.start
        at = span.end
    assert at == timeline.end
    assert sum(timeline.totals.values()) == timeline.e2e_ns
    sums = Counter()
    for span in timeline.spans:
        sums[span.category] += span.ns
    assert timeline.totals == sums


@st.composite
def served(draw):
    """A request that was served as the actors do it, with the time that each category must have."""
    truth: Counter[Category] = Counter()
    now = 1000
    happened: list[Event] = []
    stepped: list[Tick] = []

    def spend(category: Category, most: int = 50) -> int:
        nonlocal now
        ns = draw(st.integers(0, most))
        truth[category] += ns
        now += ns
        return ns

    def say(actor: str, event: str, **fields) -> None:
        group = 1 if actor == "group-1" else None
        happened.append(Event(now, actor, event, group=group, **fields))

    def step(plane: str, tick: int, waiting: Category, barrier: Category, running: Category, requests=()) -> None:
        spend(waiting)
        paced = spend(Category.PACE, 50 if plane == "decode" else 0)
        arrive = now
        held = draw(st.booleans()) and plane == "prefill"
        spend(Category.HOLD if held else barrier)
        plan = now
        spend(running)
        idle_one = draw(st.booleans())
        if idle_one and plane == "decode":
            stepped.append(Tick(1, "decode", tick + 1000, arrive=arrive, plan=plan, done=now, idle=True))
        hold = "together" if held else ""
        times = {"arrive": arrive, "plan": plan, "done": now, "paced_ns": paced, "made": arrive}
        stepped.append(Tick(1, plane, tick, **times, hold=hold, requests=requests))

    say("gateway-0", "request.received")
    spend(Category.TOKENISE)
    say("gateway-0", "request.tokenised")
    spend(Category.SUBMIT)
    say("gateway-0", "request.submitted")
    spend(Category.ROUTE)
    say("router-0", "request.placed")
    spend(Category.PLACE)
    say("group-1", "request.queued")
    tick = 0
    preemptions = draw(st.integers(0, 2))
    for life in range(preemptions + 1):
        spend(Category.PREEMPTED if life else Category.QUEUE)
        say("group-1", "request.admitted")
        for _ in range(draw(st.integers(1, 3))):
            tick += 1
            step("prefill", tick, Category.PREFILL_WAIT, Category.PREFILL_BARRIER, Category.PREFILL, ("r",))
        say("group-1", "request.prefilled", tick=tick)
        spend(Category.SLOT)
        say("group-1", "request.joined", tick=tick + 1)
        for _ in range(draw(st.integers(1, 4))):
            tick += 1
            step("decode", tick, Category.DECODE_WAIT, Category.DECODE_BARRIER, Category.DECODE)
        say("group-1", "request.preempted" if life < preemptions else "request.finished", tick=tick)
    spend(Category.DELIVER)
    say("gateway-0", "request.finished", detail={"finish": "stop"})
    return happened, stepped, truth, preemptions


@settings(max_examples=60, deadline=None)
@given(served())
def test_decoding_is_one_row_of_the_waterfall_whatever_it_waited_for(life):
    happened, stepped, truth, preemptions = life
    timeline = build("r", happened, TickIndex(stepped))
    assert terminal.decode_ns(timeline) == sum(
        truth[each] for each in Category if each.value.startswith("decode") and each is not Category.SLOT
    )
    labels = [row.label for row in waterfall.rows(timeline)]
    assert labels.count("decode") <= preemptions + 1
    assert not {label for label in labels if label.startswith("decode ")} - {"decode slot"}


@settings(max_examples=150, deadline=None)
@given(served(), st.randoms(use_true_random=False))
def test_a_served_request_is_charged_what_each_actor_spent(life, random):
    happened, stepped, truth, preemptions = life
    random.shuffle(stepped)
    timeline = build("r", happened, TickIndex(stepped))
    # Moments that fall together are told by their order in the trace, as `build` sorts stably.
    assert timeline.totals == {category: ns for category, ns in truth.items() if ns}
    assert timeline.finish == "stop"
    assert timeline.preemptions == preemptions
    assert len(timeline.prefill) == sum("r" in tick.requests for tick in stepped)


def lived(*named: tuple[int, str, str], **fields) -> list[Event]:
    return [Event(at, actor, event, group=1 if "group" in actor else None, **fields) for at, actor, event in named]


def test_a_running_request_is_charged_up_to_the_end_of_the_trace():
    happened = lived((0, "gateway-0", "request.received"), (10, "group-1", "request.queued"))
    timeline = build("r", happened, TickIndex([]), now=500)
    assert timeline.finish == RUNNING
    assert timeline.totals == {Category.TOKENISE: 10, Category.QUEUE: 490}


def test_what_a_group_does_after_the_client_left_is_not_charged_to_the_client():
    happened = lived(
        (0, "gateway-0", "request.received"),
        (5, "group-1", "request.queued"),
        (20, "gateway-0", "request.aborted"),
        (90, "group-1", "request.aborted"),
    )
    timeline = build("r", happened, TickIndex([]), now=500)
    assert timeline.e2e_ns == 20
    assert timeline.finish == "abort"


def test_a_refused_request_says_why_and_was_never_placed():
    happened = [
        *lived((0, "gateway-0", "request.received"), (3, "router-0", "request.rejected")),
        Event(4, "gateway-0", "request.failed", detail={"status": 429, "code": "rate_limit_exceeded"}),
    ]
    timeline = build("r", happened, TickIndex([]))
    assert timeline.finish == "failed (rate_limit_exceeded)"
    assert timeline.group is None
    assert timeline.e2e_ns == 4


def test_pipelined_ticks_are_not_counted_twice():
    happened = lived(
        (0, "group-1", "request.joined"), (100, "group-1", "request.finished"), (100, "gateway-0", "request.finished")
    )
    stepped = [
        Tick(1, "decode", 1, arrive=0, plan=10, done=50),
        Tick(1, "decode", 2, arrive=20, plan=30, done=70),
        Tick(1, "decode", 3, arrive=60, plan=90, done=100),
    ]
    timeline = build("r", happened, TickIndex(stepped))
    assert timeline.totals == {Category.DECODE: 70, Category.DECODE_BARRIER: 30}
    assert timeline.decode.count == 3


def test_decode_ticks_of_another_group_or_before_the_join_are_not_the_requests():
    happened = [
        Event(100, "group-1", "request.joined", group=1, tick=5),
        Event(200, "group-1", "request.finished", group=1, tick=6),
    ]
    stepped = [
        Tick(1, "decode", 4, arrive=80, plan=90, done=110),
        Tick(0, "decode", 5, arrive=100, plan=110, done=150),
        Tick(1, "decode", 5, arrive=110, plan=120, done=160),
        Tick(1, "decode", 6, arrive=160, plan=170, done=200),
        Tick(1, "decode", 7, arrive=170, plan=180, done=240),
        Tick(1, "decode", 5, epoch=1, arrive=120, plan=130, done=140),
    ]
    timeline = build("r", happened, TickIndex(stepped))
    assert timeline.decode.count == 2
    assert timeline.decode.mean_ns == (50 + 40) // 2
    assert [tick.tick for tick in timeline.decode.worst] == [5, 6]


def test_events_without_tick_numbers_are_joined_by_time():
    happened = [
        Event(100, "group-1", "request.joined", group=1),
        Event(150, "group-1", "request.joined", group=1),
        Event(200, "group-1", "request.finished", group=1),
    ]
    stepped = [
        Tick(1, "decode", 4, arrive=80, plan=90, done=110),  # was under way when the row joined
        Tick(1, "decode", 5, arrive=101, plan=110, done=140),
        Tick(1, "decode", 6, arrive=150, plan=160, done=200),
        Tick(1, "decode", 7, arrive=170, plan=180, done=240),  # planned ahead of the last token
    ]
    timeline = build("r", happened, TickIndex(stepped))
    assert timeline.decode.count == 2
    assert timeline.totals == {Category.DECODE_WAIT: 10 + 1, Category.DECODE_BARRIER: 9 + 10, Category.DECODE: 30 + 40}


def test_a_request_begins_before_its_first_event_when_its_end_says_so():
    happened = [
        Event(30, "gateway-0", "request.received"),
        Event(90, "gateway-0", "request.finished", detail={"e2e_ns": 80}),
    ]
    timeline = build("r", happened, TickIndex([]))
    assert timeline.totals == {Category.RECEIVE: 20, Category.TOKENISE: 60}


def test_without_tick_events_a_phase_counts_as_work():
    happened = lived(
        (0, "group-1", "request.admitted"), (10, "group-1", "request.joined"), (30, "group-1", "request.finished")
    )
    timeline = build("r", happened, TickIndex([]))
    assert timeline.totals == {Category.PREFILL: 10, Category.DECODE: 20}


def test_no_events_is_an_error_that_names_the_request():
    with pytest.raises(ValueError, match="ghost"):
        build("ghost", [], TickIndex([]))


@pytest.mark.parametrize(
    ("tick", "text"),
    [
        (Tick(1, "decode", 1, arrive=0, plan=90, done=100, last=0), "waited for group 0"),
        (Tick(1, "decode", 1, arrive=0, plan=90, done=100, last=1), "release on its way"),
        (Tick(1, "prefill", 1, arrive=0, plan=90, done=100, hold="3 of 4 groups"), "held: 3 of 4 groups"),
        (Tick(1, "decode", 1, arrive=0, plan=1, done=100), "no rank reported the step"),
        (
            Tick(
                1, "decode", 1, arrive=0, plan=1, done=101, steps=(Step("rank-0", 0, 90, 40), Step("rank-1", 0, 90, 2))
            ),
            "slowest rank-1",
        ),
        (
            Tick(1, "decode", 1, arrive=0, plan=1, done=101, steps=(Step("rank-0", 0, 90, 80),)),
            "collectives; slowest rank-0",
        ),
        (Tick(1, "decode", 1, arrive=0, plan=90, done=100, previous=80), "no rank reported the step"),
    ],
)
def test_the_reason_of_a_tick_names_who_was_last(tick, text):
    assert reason(tick) == text
    assert text in {waited_for(tick), ran(tick)}


def test_what_the_step_before_hides_is_not_the_barriers():
    hidden = Tick(1, "decode", 2, arrive=20, plan=60, done=100, previous=50)
    assert (hidden.barrier_ns, hidden.run_ns) == (10, 40)
    ahead = Tick(1, "decode", 2, arrive=20, plan=30, done=100, previous=50)
    assert (ahead.barrier_ns, ahead.run_ns) == (0, 50)
    assert Tick(1, "decode", 2, arrive=20, plan=30, done=100, previous=50, step_ns=45).run_ns == 45


def test_a_choice_that_ended_early_waits_for_the_others():
    happened = lived(
        (0, "gateway-0", "request.submitted"),
        (40, "group-1", "request.finished"),
        (100, "gateway-0", "request.finished"),
    )
    timeline = build("r/1", happened, TickIndex([]), choices=2, together=90)
    assert timeline.totals == {Category.ROUTE: 40, Category.SIBLINGS: 50, Category.DELIVER: 10}
    alone = build("r/1", happened, TickIndex([]), choices=2, together=40)
    assert alone.totals == {Category.ROUTE: 40, Category.DELIVER: 60}
    assert build("r", happened, TickIndex([]), choices=2, together=900).totals[Category.SIBLINGS] == 60


@settings(max_examples=200, deadline=None)
@given(st.lists(ticks, max_size=30), times, times)
def test_the_index_finds_every_tick_that_touches_a_stretch(stepped, one, other):
    start, end = min(one, other), max(one, other)
    found = TickIndex(stepped).decoding(1, start, end)
    for tick in stepped:
        begun = next((at for at in (tick.arrive, tick.plan, tick.done) if at is not None), 0)
        touches = begun < end and (tick.done is None or tick.done > start)
        if tick.group == 1 and tick.plane != "prefill" and not tick.idle and touches:
            assert tick in found
