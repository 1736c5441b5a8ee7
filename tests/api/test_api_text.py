"""Text to tokens and back: whatever takes long lets other threads of the process work, which is where the event loop is."""

import threading
import time

import pytest
from api_tokenizers import byte_fallback, byte_level

from edgemesh.api.errors import ApiError

LONG = "the quick brown fox, größer als 日本 " * 20_000
BEATS = 10
"""A call that keeps the interpreter's lock lets no other thread turn even once."""


def turns_beside(call):
    """How often this thread turns while another one is in ``call``; what that returns.

    A busy machine may leave it few turns, but not every time.
    """
    for _ in range(10):
        results, turns = [], 0
        thread = threading.Thread(target=lambda results=results: results.append(call()))
        thread.start()
        while thread.is_alive():
            turns += 1
            time.sleep(0.001)
        thread.join()
        if turns > BEATS:
            break
    return turns, results[0]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_long_texts_are_read_and_written_beside_other_threads(make):
    text = make()
    turns, ids = turns_beside(lambda: text.encode(LONG, add_special_tokens=False))
    assert turns > BEATS
    assert ids == text.tokenizer.encode(LONG, add_special_tokens=False).ids
    turns, written = turns_beside(lambda: text.decode(ids * 4, skip_special_tokens=True))
    assert turns > BEATS
    assert written == text.tokenizer.decode(ids * 4, skip_special_tokens=True)


def test_special_tokens_are_added_where_they_are_asked_for():
    text = byte_fallback()
    for asked in (True, False):
        assert (
            text.encode("the <s> fox", add_special_tokens=asked)
            == text.tokenizer.encode("the <s> fox", add_special_tokens=asked).ids
        )


def test_a_text_of_more_tokens_than_any_model_reads_is_refused_and_no_list_of_them_is_made(monkeypatch):
    monkeypatch.setattr("edgemesh.api.text.MOST_TOKENS", 3)
    text = byte_fallback()
    assert len(text.encode("the ", add_special_tokens=False)) <= 3
    with pytest.raises(ApiError, match=r"`messages` makes \d+ tokens; the most of one text is 3") as refused:
        text.encode("fox " * 9, add_special_tokens=False, param="messages")
    assert (refused.value.status, refused.value.detail.param) == (400, "messages")
