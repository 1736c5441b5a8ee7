"""What a gateway sends, over links that take nothing for a while."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.actors import gateway_outbox
from edgemesh.actors.gateway_outbox import UNDER_WAY_BYTES, Outbox
from edgemesh.api.errors import ApiError
from edgemesh.runtime.link import LinkFull, PeerAbsent
from edgemesh.runtime.trace import ListTrace
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Cancel, Credit, Sampling, Submit


class Link:
    def __init__(self):
        self.trace, self.sent, self.fails = ListTrace(), [], None
        self.tries = 0

    def now(self):
        return 0

    def send(self, _kind, message, to):
        self.tries += 1
        if self.fails is not None:
            raise self.fails
        self.sent.append((message, to))


FULL = LinkFull("full")


def submit(name, tokens):
    return Submit(name, 0, 0, TokenArray(bytes(4 * tokens)), Sampling(), 1)


def test_a_newer_word_replaces_the_one_that_waits():
    link = Link()
    outbox = Outbox(link)
    link.fails = FULL
    outbox.steer(Credit(0, "a", 0, 100), 0)
    outbox.steer(Credit(1, "b", 0, 100), 1)
    outbox.steer(Credit(0, "a", 0, 200), 0)
    outbox.steer(Cancel(1, "b", 0), 1)
    outbox.retry()
    assert link.sent == []
    link.fails = None
    outbox.retry()
    assert link.sent == [(Credit(0, "a", 0, 200), "group-0"), (Cancel(1, "b", 0), "group-1")]
    outbox.retry()
    assert len(link.sent) == 2


def test_what_is_sent_at_last_leaves_nothing_older_to_send():
    link = Link()
    outbox = Outbox(link)
    link.fails = FULL
    outbox.steer(Credit(0, "a", 0, 100), 0)
    link.fails = None
    outbox.steer(Cancel(0, "a", 0), 0)
    outbox.retry()
    assert link.sent == [(Cancel(0, "a", 0), "group-0")]


def test_words_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(gateway_outbox, "UNSENT", 3)
    link = Link()
    outbox = Outbox(link)
    link.fails = FULL
    for number in range(10):
        outbox.steer(Cancel(0, str(number), 0), 0)
    link.fails = None
    outbox.retry()
    assert [message.request for message, _ in link.sent] == ["7", "8", "9"]


def test_a_link_that_is_full_is_tried_once_however_many_words_wait_for_it():
    link = Link()
    outbox = Outbox(link)
    link.fails = FULL
    words = [(Cancel(number % 2, str(number), 0), number % 2) for number in range(100)]
    for word, group in words:
        outbox.steer(word, group)
    link.tries = 0
    outbox.retry()
    assert link.tries == 2
    link.fails = None
    outbox.retry()
    assert sorted(link.sent, key=lambda each: int(each[0].request)) == [
        (word, f"group-{group}") for word, group in words
    ]


def test_a_group_that_is_gone_is_traced_and_not_tried_again():
    link = Link()
    outbox = Outbox(link)
    link.fails = PeerAbsent("gone")
    outbox.steer(Cancel(0, "a", 0), 0)
    link.fails = None
    outbox.retry()
    assert link.sent == []
    assert link.trace.named("steer.unsent")[0]["request"] == "a"


@pytest.mark.parametrize(("fails", "status"), [(FULL, 429), (PeerAbsent("gone"), 503)])
def test_a_router_that_takes_nothing_is_said_so_and_nothing_is_under_way(fails, status):
    link = Link()
    outbox = Outbox(link)
    link.fails = fails
    with pytest.raises(ApiError) as refused:
        outbox.submit(submit("a", 10))
    assert refused.value.status == status
    assert outbox.under_way_bytes == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 1 << 20]), st.booleans()), max_size=200))
def test_prompts_under_way_are_bounded_in_bytes(steps):
    link = Link()
    outbox, there = Outbox(link), {}
    for number, (name, tokens, arrives) in enumerate([*steps, *[(0, 1 << 20, False)] * 70]):
        request = f"{name}/{number}"
        fits = not there or sum(there.values()) + 4 * tokens <= UNDER_WAY_BYTES
        if fits:
            outbox.submit(submit(request, tokens))
            there[request] = 4 * tokens
        else:
            with pytest.raises(ApiError, match="more than it can take now"):
                outbox.submit(submit(request, tokens))
        if arrives and there:
            gone = next(iter(there))
            outbox.arrived(gone)
            outbox.arrived(gone)
            del there[gone]
        assert outbox.under_way_bytes == sum(there.values()) <= UNDER_WAY_BYTES
