"""What each parameter changes in the job that goes into the mesh and in what comes out of it."""

import itertools
import json

import msgspec
import pytest
from api_tokenizers import byte_fallback, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.api.decode import BodyDecoder
from edgemesh.api.detokenize import IdPieces
from edgemesh.api.errors import ApiError
from edgemesh.api.events import Content
from edgemesh.api.extras import (
    Extras,
    extras_of,
    ranked,
    with_prompt,
    with_token_ids,
    with_usage,
)
from edgemesh.api.forms import Part
from edgemesh.api.limits import Limits
from edgemesh.api.logprobs import chat_logprobs, completion_logprobs
from edgemesh.api.openai import ChatRequest, CompletionRequest
from edgemesh.api.replies import usage
from edgemesh.api.resolve import resolve_chat, resolve_completion, truncated
from edgemesh.api.sse import ChatChunks, CompletionChunks, Ending, Head
from edgemesh.api.stop import StopMatcher
from edgemesh.api.stream import TextStream
from edgemesh.api.words import MAX_TOGETHER, MAX_TOKENS, bad_words
from edgemesh.decide.planning import MAX_JOINS
from edgemesh.wire.codec import MAX_FRAME_BYTES
from edgemesh.wire.messages import Logprob, Sampling

LIMITS = Limits(model="tiny", context=64, vocab_size=1000, eos_token_ids=(7, 8), groups=2)
DECODER = BodyDecoder()
COMPLETION = {"model": "tiny", "prompt": "x"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


def request(**fields):
    kind, body = (ChatRequest, CHAT) if fields.pop("chat", False) else (CompletionRequest, COMPLETION)
    return DECODER.decode(json.dumps(body | fields).encode(), kind)


def job(ids=(1, 2, 3), **fields):
    return resolve_completion(request(**fields), [ids], LIMITS, 5)


# --- into the mesh ---


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, range(1, 51)),
        ({"truncate_prompt_tokens": 3}, (48, 49, 50)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, (48, 49, 50)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, (1, 2, 3)),
        ({"truncate_prompt_tokens": 64}, range(1, 51)),
        ({"truncate_prompt_tokens": -1}, range(3, 51)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 60}, range(47, 51)),
    ],
)
def test_a_prompt_is_truncated_to_its_last_or_first_tokens(fields, left):
    assert job(range(1, 51), **fields).prompts[0].tolist() == list(left)


def test_a_truncated_prompt_fits_where_the_whole_does_not():
    long = range(1, 100)
    with pytest.raises(ApiError) as caught:
        job(long)
    assert caught.value.detail.code == "context_length_exceeded"
    assert len(job(long, truncate_prompt_tokens=-1).prompts[0]) == 48
    chat = resolve_chat(request(chat=True, truncate_prompt_tokens=-1), long, LIMITS, 1)
    assert (len(chat.prompts[0]), chat.choices[0].max_tokens) == (63, 1)


def test_a_prompt_is_never_truncated_to_nothing():
    assert list(truncated(request(truncate_prompt_tokens=-1), range(9), 64, LIMITS)) == [8]


def test_best_of_draws_more_than_it_gives_and_needs_their_log_probabilities():
    found = job(n=2, best_of=5)
    assert [choice.sampling.choice for choice in found.choices] == [0, 1, 2, 3, 4]
    assert {choice.sampling.logprobs for choice in found.choices} == {0}
    assert (found.extras.best, found.extras.scored) == (2, True)
    assert job(n=2, best_of=5, logprobs=3).choices[0].sampling.logprobs == 3
    assert job(n=2, best_of=5, logprobs=3).extras.scored is False
    same = job(n=2, best_of=2)
    assert (len(same.choices), same.extras.best, same.choices[0].sampling.logprobs) == (2, 0, -1)


def test_bad_words_reach_every_choice():
    found = resolve_completion(request(n=2), [(1, 2)], LIMITS, 5, ((4,), (5, 6)))
    assert {choice.sampling.bad_words for choice in found.choices} == {((4,), (5, 6))}
    assert found.choices[0].sampling.needs_history
    assert not resolve_chat(request(chat=True), (1,), LIMITS, 5, ((4,),)).choices[0].sampling.needs_history


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_bad_word_is_banned_at_the_beginning_and_behind_a_blank(make):
    text = make()
    found = bad_words(text, ["the", " the", "日本"])
    assert len(set(found)) == len(found)
    for form in ("the", " the", "日本", " 日本"):
        assert tuple(text.encode(form, add_special_tokens=False)) in found
    assert bad_words(text, [" "])
    assert bad_words(text, []) == ()


def test_a_bad_word_of_too_many_tokens_is_named():
    with pytest.raises(ApiError) as caught:
        bad_words(byte_level(), ["the", "語" * (MAX_TOKENS + 1)])
    assert caught.value.detail.param == "bad_words[1]"


def test_bad_words_of_too_many_tokens_together_are_refused():
    long = [chr(0x4E00 + number) * 20 for number in range(128)]
    with pytest.raises(ApiError, match=f"more than {MAX_TOGETHER} tokens") as caught:
        bad_words(byte_level(), long)
    assert caught.value.detail.param == "bad_words"
    found = bad_words(byte_level(), long[:30])
    assert sum(map(len, found)) <= MAX_TOGETHER
    # All that may be asked for at once fits a message with as many choices as a step may take.
    sampling = Sampling(
        logit_bias=tuple((1 << 30, 1.5) for _ in range(1024)),
        allowed_token_ids=(1 << 30,) * 4096,
        stop_token_ids=(1 << 30,) * 256,
        bad_words=((1 << 30,) * MAX_TOKENS,) * (MAX_TOGETHER // MAX_TOKENS),
    )
    assert len(msgspec.msgpack.encode(sampling)) * MAX_JOINS < MAX_FRAME_BYTES / 2


def test_top_p_of_nothing_keeps_the_likeliest_token():
    assert 0 < job(top_p=0).choices[0].sampling.top_p <= 1e-6
    assert job(top_p=0.3).choices[0].sampling.top_p == 0.3


def test_top_k_of_minus_one_keeps_all():
    assert {job(**fields).choices[0].sampling.top_k for fields in ({}, {"top_k": -1}, {"top_k": 0})} == {0}
    assert job(top_k=4).choices[0].sampling.top_k == 4


def test_only_the_same_salt_shares_what_is_cached():
    plain, one, again, other = (job(**fields).tenant for fields in ({}, *({"cache_salt": salt} for salt in "aab")))
    assert plain == ""
    assert one == again != other
    assert "a" * 3 not in one


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({"session": "a", "session_id": "b", "user": "c"}, "a"),
        ({"session_id": "b", "prompt_cache_key": "d"}, "b"),
        ({"prompt_cache_key": "d", "user": "c"}, "d"),
        ({"user": "c"}, "c"),
        ({}, ""),
    ],
)
def test_what_keeps_a_conversation_together(fields, session):
    assert job(**fields).session == session


def test_what_an_answer_shows_beside_openais_fields():
    assert extras_of(request(), LIMITS) == Extras(quiet_stops=(7, 8))
    asked = {"return_token_ids": True, "include_stop_str_in_output": True, "ignore_eos": True, "stream": True}
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    shown = Extras(token_ids=True, usage_often=True, stop_text=True)
    assert extras_of(request(**asked), LIMITS) == shown
    assert extras_of(request(chat=True, service_tier="auto"), LIMITS).service_tier == "default"


# --- out of it ---


def part(index, *logprobs):
    return Part(index, [Content(f"text {index}")], Ending("stop"), [Logprob(1, value) for value in logprobs])


def test_the_best_choices_of_each_prompt_are_kept_best_first():
    parts = [part(0, -3.0), part(1, -1.0, -1.0), part(2), part(3, -9.0), part(4, -2.0), part(5, -0.5)]
    kept = ranked(parts, [0, 0, 0, 1, 1, 1], Extras(best=2, scored=True))
    assert [(each.index, each.message.content) for each in kept] == [
        (0, "text 1"),
        (1, "text 0"),
        (2, "text 5"),
        (3, "text 4"),
    ]
    assert {each.logprobs for each in kept} == {None}
    assert ranked(parts, [0, 0, 0, 1, 1, 1], Extras(best=1))[0].logprobs == parts[1].logprobs
    assert ranked(parts, [0] * 6, Extras()) == parts


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab#.", max_size=20), stop=st.text("ab#", min_size=1, max_size=3), cut=st.lists(st.integers(0, 20)))
def test_a_text_may_end_behind_its_stop_string(text, stop, cut):
    matcher, found = StopMatcher([stop], include=True), ""
    places = sorted({0, len(text), *(each % (len(text) + 1) for each in cut)})
    for start, end in itertools.pairwise(places):
        found += matcher.feed(text[start:end])
    found += matcher.finish()
    at = text.find(stop)
    assert found == (text if at < 0 else text[: at + len(stop)])


def test_the_text_of_a_stop_token_comes_last_and_counts_as_none():
    text = byte_level()
    tokens = text.encode("the fox", add_special_tokens=False)
    stream = TextStream(text.pieces)
    shown = stream.feed(tokens[:-1]) + stream.finish(tokens[-1])
    assert (shown, stream.tokens) == ("the fox", len(tokens) - 1)


HOSTILE = '"finish_reason":null}],"usage":null}\n\ndata: {"finish_reason":"x"}'
USAGE = usage(3, 2, 0)


def events(data):
    return [json.loads(each.removeprefix(b"data: ")) for each in data.split(b"\n\n") if each]


@pytest.mark.parametrize("kind", [ChatChunks, CompletionChunks])
def test_what_is_put_into_events_leaves_the_rest_as_it_is(kind):
    head = Head("id", "chat.completion.chunk" if kind is ChatChunks else "text_completion", 1, "m")
    chunks = kind(head, 0, include_usage=True)
    plain = chunks.text(HOSTILE) + chunks.text("b")
    made = events(with_usage(with_token_ids(plain, [4, 5]), USAGE))
    assert [each.pop("usage") for each in made] == [msgspec.to_builtins(USAGE)] * 2
    assert made[1]["choices"][0].pop("token_ids") == [4, 5]
    assert made == [{key: value for key, value in each.items() if key != "usage"} for each in events(plain)]
    for reason in ('a"}b', 9, None):
        stop = (reason, None) if isinstance(reason, str) else (None, reason)
        [last] = events(chunks.last(Ending("stop", *stop)))
        assert last["choices"][0]["stop_reason"] == reason
        assert last["choices"][0]["finish_reason"] == "stop"
    [first] = events(with_prompt(chunks.text(HOSTILE), b"[1,2]", chat=kind is ChatChunks))
    assert (first if kind is ChatChunks else first["choices"][0])["prompt_token_ids"] == [1, 2]


def test_log_probabilities_may_name_tokens_by_their_ids():
    text = byte_level()
    tokens = text.encode("größer", add_special_tokens=False)
    entries = [Logprob(token, -1.0, ((token, -1.0), (5, -2.0))) for token in tokens]
    plain, named = (completion_logprobs(entries, pieces, 3) for pieces in (text.pieces, IdPieces(text.pieces)))
    assert named.tokens == [f"token_id:{token}" for token in tokens]
    assert named.text_offset == plain.text_offset
    assert set(msgspec.json.decode(named.top_logprobs[0])) == {f"token_id:{tokens[0]}", "token_id:5"}
    chat = msgspec.json.decode(msgspec.json.encode(chat_logprobs(entries, IdPieces(text.pieces))))
    assert [each["token"] for each in chat["content"]] == named.tokens
    assert bytes(chat["content"][0]["bytes"]) == text.pieces.bytes_of(tokens[0])
    assert chat["content"][0]["top_logprobs"][1]["token"] == "token_id:5"
