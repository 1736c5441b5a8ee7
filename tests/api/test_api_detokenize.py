import itertools
import time

import pytest
from api_tokenizers import byte_fallback, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.api.detokenize import Detokenizer, bytes_of

MODELS = {"byte_level": byte_level, "byte_fallback": byte_fallback}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text("the quick ö🎉👩‍👧日", max_size=40)


def cut(tokens, cuts):
    """The tokens in pieces that end at these places."""
    places = sorted({place % (len(tokens) + 1) for place in cuts} | {0, len(tokens)})
    return [tokens[a:b] for a, b in itertools.pairwise(places)]


def streamed(model, pieces, *, skip_special=True):
    detokenizer = Detokenizer(model.pieces, skip_special=skip_special)
    return [detokenizer.feed(piece) for piece in pieces] + [detokenizer.finish()]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_streamed_text_is_the_whole_text(name, text, cuts):
    model = MODELS[name]()
    tokens = model.encode(text, add_special_tokens=False)
    parts = streamed(model, cut(tokens, cuts))
    # A stream goes on after a prompt: the blank that sentencepiece puts first is the text's own.
    whole = model.decode(tokens, skip_special_tokens=True)
    assert "".join(parts) == (" " + whole if name == "byte_fallback" and text else whole)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(st.integers(0, 421), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_any_tokens_stream_as_the_tokenizer_decodes_them(tokens, cuts):
    model = byte_level()
    for skip in (True, False):
        parts = streamed(model, cut(tokens, cuts), skip_special=skip)
        assert "".join(parts) == model.decode(tokens, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_byte_fallback_says_what_the_bytes_say(data, cuts):
    model = byte_fallback()
    parts = streamed(model, cut([byte + 2 for byte in data], cuts))
    assert "".join(parts) == data.decode(errors="replace")


def test_no_piece_ends_inside_a_character():
    model = byte_level()
    tokens = model.encode("🎉é日", add_special_tokens=False)
    assert len(tokens) > 3
    parts = streamed(model, [[token] for token in tokens])
    assert [part for part in parts if part] == ["🎉", "é", "日"]


@pytest.mark.parametrize("byte", [0xE2, 0x80, 0xF0, 0xFF])
def test_thousands_of_incomplete_bytes_cost_the_same_each(byte):
    model = byte_fallback()

    def seconds(count):
        detokenizer = Detokenizer(model.pieces)
        start = time.thread_time()
        text = "".join(detokenizer.feed((byte + 2,)) for _ in range(count)) + detokenizer.finish()
        spent = time.thread_time() - start
        assert text == (bytes([byte]) * count).decode(errors="replace")
        return spent

    seconds(100)
    short, long = min(seconds(2000) for _ in range(5)), min(seconds(20000) for _ in range(3))
    assert long < 40 * short, (short, long)


def test_special_tokens_are_left_out_unless_asked_for():
    model = byte_level()
    tokens = model.encode("<s>the<think>", add_special_tokens=False)
    assert "".join(streamed(model, [tokens])) == "the<think>"
    assert "".join(streamed(model, [tokens], skip_special=False)) == "<s>the<think>"


def test_an_id_without_a_token_is_no_text():
    assert "".join(streamed(byte_level(), [[10**6]])) == ""


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}, {"type": "Sequence", "decoders": [{"type": "CTC"}]}])
def test_a_decoder_that_is_not_supported_is_named(decoder):
    with pytest.raises(ValueError, match=r"not supported|supported are"):
        bytes_of(decoder)
