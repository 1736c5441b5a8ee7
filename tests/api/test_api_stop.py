import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgemesh.api.stop import StopMatcher

LETTERS = st.text("ab\n", max_size=24)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def expected(text, stops):
    """Character by character: the text before the stop string that is complete first (the longest of several)."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(text, stops, cuts):
    matcher = StopMatcher(stops)
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    shown = [matcher.feed(text[a:b]) for a, b in itertools.pairwise(places)]
    return "".join(shown) + matcher.finish(), matcher.matched


@settings(max_examples=400, deadline=None)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=24))
@example(text="xabcx", stops=["abcd", "bc"], cuts=[1, 2, 3, 4])
@example(text="aab", stops=["ab"], cuts=[1, 2])
def test_the_cut_does_not_depend_on_the_pieces(text, stops, cuts):
    assert run(text, stops, cuts) == expected(text, stops)


@settings(max_examples=200, deadline=None)
@given(text=LETTERS, stops=STOPS)
def test_nothing_is_shown_that_a_stop_string_may_still_take_back(text, stops):
    matcher = StopMatcher(stops)
    shown = ""
    for letter in text:
        shown += matcher.feed(letter)
        if matcher.matched is None:
            rest = text[: len(shown)]
            assert rest == shown
    assert shown == expected(text, stops)[0][: len(shown)]


def test_a_false_start_is_sent_on():
    matcher = StopMatcher(["STOP"])
    assert [matcher.feed(part) for part in ("say ST", "OR", "Y ST")] == ["say ", "STOR", "Y "]
    assert matcher.finish() == "ST"


def test_a_stop_string_across_pieces_never_shows():
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.feed(part) for part in ("Hi.", "\n", "\nUs", "er:", " more")] == ["Hi.", "", "", "", ""]
    assert matcher.matched == "\n\nUser:"
    assert matcher.finish() == ""
