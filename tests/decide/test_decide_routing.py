"""Placement: balance in a burst, stickiness and its bound, pins, limits, and what the reports have not seen."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.decide.routing import MAX_REMEMBERED, Choice, Config, RouterState, cost
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import LoadReport, Rejected, Sampling, Submit


def router(groups=4, policy="prefix", max_waiting=1000, max_waiting_tokens=1 << 22, **reported):
    state = RouterState(Config(groups, policy, 1.25, max_waiting, max_waiting_tokens, 4))
    for group in range(groups):
        state.report(load(group, **reported))
    return state


def load(group, revision=0, *, epoch=0, running=0, waiting=0, outstanding=0, seen=0, draining=False):
    return LoadReport(group, epoch, revision, running, waiting, outstanding, 10, 10, seen, draining)


def submit(prompt=range(20), *, name="r", max_tokens=16, pin=None, session="", tenant=""):
    tokens = TokenArray.of(prompt)
    return Submit(name, 0, 0, tokens, Sampling(), max_tokens, pin=pin, session=session, tenant=tenant)


def place(state, request):
    choice = state.choose(request)
    assert isinstance(choice, Choice), choice
    state.place(request, choice)
    return choice


@pytest.mark.parametrize("policy", ["prefix", "round_robin", "least_tokens"])
@pytest.mark.parametrize("groups", [2, 3, 8])
@pytest.mark.parametrize("alike", [0, 12])
def test_a_burst_is_balanced_though_no_report_comes(policy, groups, alike):
    state = router(groups, policy)
    placed = Counter(
        place(state, submit([*range(alike), *range(1000 * each, 1000 * each + 40)])).group for each in range(64)
    )
    assert max(placed.values()) - min(placed[group] for group in range(groups)) <= 3, placed


@pytest.mark.parametrize("session", ["", "s"])
def test_what_one_tenant_asked_places_no_request_of_another(session):
    state = router(4)
    place(state, submit(range(200), max_tokens=1, session=session, tenant="a"))
    for tenant, follows in (("a", True), ("b", False), ("", False)):
        choice = state.choose(submit(range(200), session=session, tenant=tenant))
        assert ("outstanding" not in choice.why) == follows, choice


def test_a_known_prefix_is_followed_until_waiting_costs_more_than_it_saves():
    state = router(2)
    document = range(200)
    home = place(state, submit([*document, 1000])).group
    state.report(load(home, 1, seen=1))
    for turn in range(3):
        choice = place(state, submit([*document, 2000 + turn]))
        assert choice.group == home
        assert choice.why == "prefix of 200 tokens"
        state.report(load(home, 2 + turn, seen=2 + turn))
    state.report(load(home, 9, running=9, outstanding=5000, seen=4))
    moved = place(state, submit([*document, 3000]))
    assert moved.group != home
    assert "overloaded" in moved.why
    state.report(load(home, 10, outstanding=100, seen=4))
    assert place(state, submit([*document, 3001])).group == home, "both know it now; the emptier one gets it"


def test_a_session_stays_with_its_group():
    state = router(4)
    homes = {name: place(state, submit([each], session=name)).group for each, name in enumerate("abcdefgh")}
    for group in range(4):
        state.report(load(group, 1, seen=2))
    for name, home in homes.items():
        choice = place(state, submit([77], session=name))
        assert (choice.group, choice.why) == (home, "session")


def test_a_pin_is_obeyed_or_refused_but_never_ignored():
    state = router(3, "round_robin", max_waiting=2)
    assert [place(state, submit(pin=2)).group for _ in range(2)] == [2, 2]
    full = state.choose(submit(pin=2))
    assert (full.status, full.code) == (429, "queue_full")
    assert full.retry_after_s >= 1
    wrong = state.choose(submit(pin=3))
    assert (wrong.status, wrong.code) == (400, "invalid_group")
    assert "groups are 0 to 2" in wrong.reason
    state.report(load(1, 1, draining=True))
    assert state.choose(submit(pin=1)).status == 503


def test_full_queues_are_passed_over_and_then_refused():
    state = router(2, "round_robin", max_waiting=3)
    placed = [place(state, submit()).group for _ in range(6)]
    assert Counter(placed) == {0: 3, 1: 3}
    refused = state.choose(submit())
    assert isinstance(refused, Rejected)
    assert (refused.status, refused.retry_after_s) == (429, 4)
    state.report(load(1, 1, running=3, seen=3))
    assert place(state, submit()).group == 1


def test_waiting_tokens_are_limited_but_one_request_always_fits():
    state = router(1, max_waiting_tokens=100)
    big = submit(range(200))
    place(state, big)
    assert state.choose(submit()).status == 429


def test_what_may_be_generated_does_not_wait():
    """Chats that state no length may take the whole context; that is no reason to turn short prompts away."""
    state = router(1, max_waiting_tokens=1000)
    for number in range(50):
        assert place(state, submit(range(20), name=f"r{number}", max_tokens=100_000)).group == 0
    assert state.choose(submit()).status == 429
    state.report(LoadReport(0, 0, 1, 50, 1, 5_000_000, 10, 10, 50, waiting_tokens=980))
    assert place(state, submit(range(20))).group == 0
    assert state.choose(submit(range(1))).status == 429


def test_without_a_group_that_reports_there_is_nowhere_to_go():
    state = RouterState(Config(2, "prefix", 1.25, 10, 1000, 4))
    assert state.choose(submit()).status == 503
    state.report(load(1))
    assert [place(state, submit([each])).group for each in range(3)] == [1, 1, 1]
    state.report(load(1, 1, seen=3, draining=True))
    assert state.choose(submit()).status == 503
    state.report(load(9))  # no group of this mesh


def test_a_new_epoch_of_a_group_starts_its_account_anew():
    state = router(1)
    for _ in range(3):
        place(state, submit())
    state.report(load(0, epoch=1, seen=0))
    assert state.loads[0].outstanding_tokens == 0
    state.report(load(0, 99, epoch=0, outstanding=1000))
    assert state.loads[0].outstanding_tokens == 0, "an older epoch says nothing"


def test_memory_is_bounded():
    state = router(1)
    for each in range(MAX_REMEMBERED // 64 + 10):
        request = submit(range(each * 300, each * 300 + 299))
        state.place(request, state.choose(request))
        state.report(load(0, each + 1, seen=each + 1))
    assert len(state.memory) == MAX_REMEMBERED


@given(
    events=st.lists(st.tuples(st.sampled_from(["place", "arrive", "report", "finish"]), st.integers(0, 2)), max_size=60)
)
@settings(max_examples=80, deadline=None)
def test_the_account_equals_the_truth_however_reports_are_late(events):
    """A group has all requests that arrived; the router must know these, as last reported, and all others that it placed."""
    state = router(3, "least_tokens")
    flying = {group: [] for group in range(3)}
    there = {group: [] for group in range(3)}
    seen, told = Counter(), dict.fromkeys(range(3), (0, 0))
    for revision, (event, group) in enumerate(events, 1):
        if event == "place":
            request = submit(range(1 + revision))
            flying[place(state, request).group].append(cost(request))
        elif event == "arrive" and flying[group]:
            there[group].append(flying[group].pop(0))
            seen[group] += 1
        elif event == "finish" and there[group]:
            there[group].pop()
        elif event == "report":
            told[group] = (sum(there[group]), seen[group])
            state.report(load(group, revision, outstanding=sum(there[group]), seen=seen[group]))
            stale = load(group, revision - 1, outstanding=12345, seen=0)
            state.report(stale)
        for each, account in enumerate(state.loads):
            unseen = account.placed - told[each][1]
            assert len(account.unseen) == unseen
            assert account.outstanding_tokens == told[each][0] + sum(tokens for tokens, _ in account.unseen)
            assert account.unseen_tokens == sum(tokens for tokens, _ in account.unseen)
            assert account.waiting_tokens == account.unseen_prompts == sum(prompt for _, prompt in account.unseen)
