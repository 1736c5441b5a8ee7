import itertools

import msgspec
from api_tokenizers import byte_level
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.api.logprobs import FLOOR, chat_logprobs, completion_logprobs
from edgemesh.api.replies import ChatLogprobs
from edgemesh.api.stream import TextStream
from edgemesh.wire.messages import Logprob

TEXTS = st.text("ab ö🎉the\n", max_size=30)
STOPS = st.lists(st.text("ab ö🎉\n", min_size=1, max_size=3), max_size=3)


def run(tokens, cuts, stops, *, logprobs, min_tokens=0):
    """(text, log-probabilities, tokens counted, whether a stop string ended it) of a stream cut into pieces, some empty."""
    stream = TextStream(byte_level().pieces, stops, min_tokens=min_tokens)
    places = sorted([*(cut % (len(tokens) + 1) for cut in cuts), 0, len(tokens)])
    text, shown = "", []
    for a, b in itertools.pairwise(places):
        text += stream.feed(tokens[a:b], [Logprob(token, -1.0) for token in tokens[a:b]] if logprobs else ())
        shown += stream.shown
        assert stream.length == len(text)
        if stream.stopped:
            return text, shown, stream.tokens, True
    text += stream.finish()
    return text, shown + stream.shown, stream.tokens, stream.stopped


@settings(max_examples=250, deadline=None)
@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 60), max_size=20), floor=st.integers(0, 8))
def test_pieces_change_nothing(text, stops, cuts, floor):
    tokens = byte_level().encode(text, add_special_tokens=False)
    whole = run(tokens, [], stops, logprobs=True, min_tokens=floor)
    assert run(tokens, cuts, stops, logprobs=True, min_tokens=floor)[0] == whole[0]
    bare = run(tokens, cuts, stops, logprobs=False, min_tokens=floor)
    assert (bare[0], bare[2], bare[3]) == (whole[0], whole[2], whole[3])
    if not floor:
        first = min((text.find(stop) for stop in stops if stop in text), default=None)
        assert whole[3] == (first is not None)
        assert whole[0] == text if first is None else text.startswith(whole[0])


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=20))
def test_every_token_has_its_logprob_once(text, cuts):
    tokens = byte_level().encode(text, add_special_tokens=False)
    _, shown, count, _ = run(tokens, cuts, [], logprobs=True)
    assert [entry.token for entry in shown] == tokens
    assert count == len(tokens)


def test_logprobs_of_text_behind_a_stop_string_never_come():
    tokens = byte_level().encode("the ab the", add_special_tokens=False)
    text, shown, count, stopped = run(tokens, range(99), ["ab"], logprobs=True)
    assert (text, stopped) == ("the ", True)
    assert "".join(byte_level().pieces.bytes_of(entry.token).decode() for entry in shown).startswith("the")
    assert len(shown) < count < len(tokens)


def test_tokens_that_must_come_cannot_stop():
    tokens = byte_level().encode("abab", add_special_tokens=False)
    assert run(tokens, [], ["a"], logprobs=False)[0] == ""
    assert run(tokens, range(9), ["a"], logprobs=False, min_tokens=len(tokens))[0] == "abab"


def test_the_first_token_after_them_can():
    letters = [byte_level().encode(letter, add_special_tokens=False)[0] for letter in "abab"]
    for floor, text in ((0, ""), (1, "ab"), (2, "ab"), (3, "abab")):
        assert run(letters, range(9), ["a"], logprobs=False, min_tokens=floor)[0] == text


def test_logprobs_wait_for_their_text():
    letters = [byte_level().encode(letter, add_special_tokens=False)[0] for letter in "xabd"]
    stream = TextStream(byte_level().pieces, ["abc"])
    released = []
    for token in letters:
        text = stream.feed((token,), (Logprob(token, -1.0),))
        released.append((text, [entry.token for entry in stream.shown]))
    x, a, b, d = letters
    assert released == [("x", [x]), ("", []), ("", []), ("abd", [a, b, d])]


def test_half_a_character_at_the_end_can_complete_a_stop_string():
    half = byte_level().encode("🎉", add_special_tokens=False)[0]
    x = byte_level().encode("x", add_special_tokens=False)[0]
    text, shown, _, stopped = run([x, half], [1], ["\N{REPLACEMENT CHARACTER}"], logprobs=True)
    assert (text, [entry.token for entry in shown], stopped) == ("x", [x], True)


def test_both_forms_of_logprobs():
    pieces = byte_level().pieces
    [token] = byte_level().encode("the", add_special_tokens=False)
    half = byte_level().encode("🎉", add_special_tokens=False)[0]
    entries = [Logprob(token, -0.25, ((token, -0.25), (half, float("-inf"))))]
    [chat] = msgspec.json.decode(msgspec.json.encode(chat_logprobs(entries, pieces)), type=ChatLogprobs).content
    assert (chat.token, chat.logprob, bytes(chat.bytes)) == ("the", -0.25, b"the")
    assert [(top.token, top.logprob) for top in chat.top_logprobs] == [
        ("the", -0.25),
        ("\N{REPLACEMENT CHARACTER}", FLOOR),
    ]
    assert bytes(chat.top_logprobs[1].bytes) == pieces.bytes_of(half)
    columns = completion_logprobs([*entries, *entries], pieces, 7)
    assert columns.tokens == ["the", "the"]
    assert columns.token_logprobs == [-0.25, -0.25]
    assert columns.text_offset == [7, 10]
    assert msgspec.json.decode(columns.top_logprobs[0]) == {"the": -0.25, "\N{REPLACEMENT CHARACTER}": FLOOR}
