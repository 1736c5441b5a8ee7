from array import array
from struct import pack

import msgspec
import pytest
from api_tokenizers import byte_fallback, byte_level
from hypothesis import given
from hypothesis import strategies as st

from edgemesh.api.detokenize import IdPieces
from edgemesh.api.forms import CompletionForm, Part
from edgemesh.api.logprobs import FLOOR, completion_logprobs, named
from edgemesh.api.prompt_scores import PromptScores, echo_columns, offsets, prompt_table
from edgemesh.api.replies import usage
from edgemesh.api.sse import Ending, Head
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Logprob, PromptLogprobs

HEAD = Head("id", "text_completion", 1, "tiny")


def bits(value):
    return int.from_bytes(pack("<f", value), "little", signed=True)


def piece(start, entries, top=0):
    """``entries`` are (log-probability, rank, [(token, log-probability)])."""
    rows = array("i")
    for value, rank, likely in entries:
        assert len(likely) == top
        rows.extend((bits(value), rank, *(number for token, each in likely for number in (token, bits(each)))))
    return PromptLogprobs(start, top, TokenArray(rows))


def scored(prompt, entries, top=0):
    scores = PromptScores(TokenArray.of(prompt))
    assert scores.take(piece(0, entries, top)) == ""
    assert scores.whole
    return scores


def plain(value):
    return msgspec.json.decode(msgspec.json.encode(value))


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 29), st.integers(0, 12)), max_size=12))
def test_pieces_that_come_twice_or_overlap_are_counted_once(length, pieces):
    entries = [(-0.5 * each, each, []) for each in range(length)]
    scores = PromptScores(TokenArray.of(range(length + 1)))
    for start, count in [*pieces, (0, length)]:
        before = scores.count
        missing = scores.take(piece(start, entries[start : start + count]))
        assert bool(missing) == (start > before)
        if missing:
            assert missing == f"prompt log-probabilities {before} to {start - 1}"
            assert scores.count == before
    assert scores.whole
    assert [(each.token, each.logprob, each.rank) for each in scores.entries(20)] == [
        (at + 1, value, rank) for at, (value, rank, _) in enumerate(entries)
    ]


def test_a_prompt_of_one_token_is_whole_at_once():
    scores = PromptScores(TokenArray.of([5]))
    assert scores.whole
    assert plain(prompt_table(scores, 3, byte_level().pieces)) == [None]
    columns = plain(echo_columns(scores, 1, byte_level().pieces, byte_level().decode([5], skip_special_tokens=True)))
    assert (columns["token_logprobs"], columns["top_logprobs"], columns["text_offset"]) == ([None], [None], [0])


def test_the_table_is_vllms():
    text = byte_level()
    prompt = text.encode("the fox", add_special_tokens=False)
    one, other = prompt[1], prompt[0]
    scores = scored(prompt, [(-2.0, 7, [(other, -0.5), (one, -2.0)])] * (len(prompt) - 1), top=2)
    table = plain(prompt_table(scores, 2, text.pieces))
    assert table[0] is None
    assert len(table) == len(prompt)
    assert table[1] == {
        str(one): {"logprob": -2.0, "rank": 7, "decoded_token": text.pieces.name_of(one)},
        str(other): {"logprob": -0.5, "rank": 1, "decoded_token": text.pieces.name_of(other)},
    }
    assert list(table[1]) == [str(one), str(other)]
    assert plain(prompt_table(scores, 0, text.pieces))[1].keys() == {str(one)}


def test_what_json_cannot_say_has_a_floor():
    text = byte_level()
    scores = scored([1, 2], [(float("-inf"), 9, [(3, float("-inf"))])], top=1)
    assert {each["logprob"] for each in plain(prompt_table(scores, 1, text.pieces))[1].values()} == {FLOOR}
    assert plain(echo_columns(scores, 1, text.pieces, ""))["token_logprobs"] == [None, FLOOR]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", ["the quick fox", "größer 日本 🎉!", " the  fox", "öö", "x"])
def test_each_echoed_token_begins_where_its_text_does(make, text):
    model = make()
    ids = model.encode(text, add_special_tokens=True)
    found = offsets(ids, text, model.pieces)
    assert found[0] == 0
    assert found == sorted(found)
    special = [model.pieces.learn(each, skip_special=True) == "" for each in ids]
    for at, (token, start) in enumerate(zip(ids, found, strict=True)):
        end = found[at + 1] if at + 1 < len(ids) else len(text)
        said = model.pieces.learn(token, skip_special=True)
        if said is not None and not special[at]:
            # The blank that a tokenizer puts before a text is not in it.
            assert text[start:end] in ({said, said.removeprefix(" ")} if not start else {said})


def test_the_tokens_of_one_character_begin_together_and_the_next_one_after_it():
    text = byte_level()
    ids = text.encode("🎉x", add_special_tokens=False)
    assert len(ids) > 2
    assert offsets(ids, "🎉x", text.pieces) == [0] * (len(ids) - 1) + [1]
    drawn = completion_logprobs([Logprob(each, -1.0) for each in ids], text.pieces, 4)
    assert drawn.text_offset == [4] * (len(ids) - 1) + [5]


def test_special_tokens_have_the_width_that_the_text_gives_them():
    text = byte_fallback()
    assert offsets([1, *text.encode("the", add_special_tokens=False)], "the", text.pieces)[:2] == [0, 0]
    level = byte_level()
    bos = level.encode("<s>", add_special_tokens=False)
    assert len(bos) == 1
    fox = level.encode("fox", add_special_tokens=False)
    assert offsets([*bos, *fox], "<s>fox", level.pieces)[:2] == [0, 3]
    assert offsets([*bos, *fox], "fox", level.pieces)[:2] == [0, 0]


def test_the_largest_of_the_alternatives_is_the_likeliest_also_among_tokens_of_one_name():
    pieces = byte_level().pieces
    broken = [each for each in range(1, 300) if pieces.name_of(each) == "�"][:2]
    assert named([(broken[0], -0.1), (broken[1], -5.0)], pieces) == {"�": pytest.approx(-0.1)}
    assert named([(broken[0], -0.1), (broken[1], -5.0)], IdPieces(pieces)).keys() == {
        f"token_id:{each}" for each in broken
    }


def test_an_echo_and_what_comes_after_it_are_one_run_of_columns():
    text = byte_level()
    echo = "the 日本"
    prompt = text.encode(echo, add_special_tokens=False)
    scores = scored(prompt, [(-1.0, 1, [(each, -1.0)]) for each in prompt[1:]], top=1)
    form = CompletionForm(IdPieces(text.pieces), [echo])
    drawn = [Logprob(each, -2.0) for each in text.encode(" fox", add_special_tokens=False)]
    shown = form.shown(0, scores, -1, 1)
    part = Part(0, echo + " fox", Ending("length"), drawn, prompt=shown, offset=len(echo))
    choice = msgspec.json.decode(form.reply(HEAD, [part], usage(1, 1, 0)))["choices"][0]
    columns = choice["logprobs"]
    assert len({len(column) for column in columns.values()}) == 1
    assert columns["tokens"] == [f"token_id:{each}" for each in (*prompt, *(entry.token for entry in drawn))]
    assert columns["token_logprobs"] == [None, *[-1.0] * (len(prompt) - 1), *[-2.0] * len(drawn)]
    assert columns["text_offset"][len(prompt)] == len(echo)
    assert "prompt_logprobs" not in choice
    bare = Part(0, echo, Ending("length"), [], prompt=form.shown(0, scores, 1, 0), offset=len(echo))
    choice = msgspec.json.decode(form.reply(HEAD, [bare], usage(1, 1, 0)))["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == len(choice["prompt_logprobs"]) == len(prompt)
