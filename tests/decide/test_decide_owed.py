"""Words that gateways must still hear: each once, in order, bounded, and not for ever."""

import pytest

from edgemesh.decide import owed
from edgemesh.decide.owed import KEEP_NS, RETRY_NS, Owed
from edgemesh.wire.messages import Failed


def word(name, gateway=0):
    return Failed(0, gateway, 0, name, 0, 503, "x", "y")


@pytest.mark.parametrize("takes", [False, True])
def test_a_gateway_that_takes_nothing_is_given_up_and_one_that_takes_a_little_is_not(takes):
    words, said, now = Owed(), [], 0
    for number in range(10_000):
        words.add(word(str(number)), 0)

    def say(each):
        said.append(each)
        return takes and len(said) % 2 == 1

    while words.deadline is not None:
        assert takes or now <= KEEP_NS + RETRY_NS
        now = words.deadline
        words.pay(now, say)
    assert (now > KEEP_NS + RETRY_NS) == takes
    assert 0 not in words


def test_one_that_is_gone_keeps_no_other_waiting():
    words, said = Owed(), []
    for name, gateway in (("a", 0), ("b", 1), ("a", 0), ("c", 1)):
        words.add(word(name, gateway), 0)

    def say(each):
        said.append((each.request, each.gateway))
        return each.gateway == 1

    words.pay(RETRY_NS, say)
    assert said == [("a", 0), ("b", 1), ("c", 1)]
    assert 0 in words
    assert 1 not in words


def test_the_oldest_are_dropped_beyond_the_bound(monkeypatch):
    monkeypatch.setattr(owed, "MOST", 3)
    words, said = Owed(), []
    for number in range(5):
        words.add(word(str(number)), 0)
    words.pay(RETRY_NS, lambda each: not said.append(each.request))
    assert said == ["2", "3", "4"]
