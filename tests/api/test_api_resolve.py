import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.api.decode import BodyDecoder
from edgemesh.api.errors import ApiError
from edgemesh.api.limits import Limits, limits_of
from edgemesh.api.openai import ChatRequest, CompletionRequest
from edgemesh.api.resolve import resolve_chat, resolve_completion
from edgemesh.wire.catalogue import CARRIES, LinkKind
from edgemesh.wire.codec import Decoder, encode
from edgemesh.wire.messages import Capacity, Sampling, Submit

LIMITS = Limits(model="tiny", context=64, vocab_size=1000, eos_token_ids=(7, 8), groups=2)
DECODER = BodyDecoder()


def completion(ids=((1, 2, 3),), seed=5, limits=LIMITS, **extra):
    body = {"model": "tiny", "prompt": "x"} | extra
    return resolve_completion(DECODER.decode(json.dumps(body).encode(), CompletionRequest), ids, limits, seed)


def chat(ids=(1, 2, 3), seed=5, **extra):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]} | extra
    return resolve_chat(DECODER.decode(json.dumps(body).encode(), ChatRequest), ids, LIMITS, seed)


def code(call, *args, **kwargs):
    with pytest.raises(ApiError) as caught:
        call(*args, **kwargs)
    return caught.value.status, caught.value.detail.code


def test_prompt_and_output_must_fit_the_context():
    assert chat(range(1, 64)).choices[0].max_tokens == 1
    assert chat(range(1, 60)).choices[0].max_tokens == 5
    assert chat(range(1, 60), max_tokens=5).choices[0].max_tokens == 5
    overflow = (400, "context_length_exceeded")
    for stream in (False, True):
        assert code(chat, range(1, 65), stream=stream) == overflow
        assert code(chat, range(1, 60), max_tokens=6, stream=stream) == overflow
        assert code(chat, range(1, 60), max_completion_tokens=6, stream=stream) == overflow
        assert code(completion, [range(1, 65)], stream=stream) == overflow
        assert code(completion, [range(1, 60)], max_tokens=6, stream=stream) == overflow
        assert code(completion, [[1], range(1, 65)], stream=stream) == overflow


def test_a_completion_without_a_length_has_openais_or_what_fits():
    assert completion([range(1, 10)]).choices[0].max_tokens == 16
    assert completion([range(1, 60)]).choices[0].max_tokens == 5
    assert completion(max_tokens=None).choices[0].max_tokens == 16


def test_a_request_larger_than_the_pool_is_refused():
    capacity = Capacity(3, 16, 4096, 1000, (7,), None, 0, 0)
    limits = limits_of(capacity, "tiny", 1)
    assert limits.context == 32
    assert code(completion, [range(1, 33)], limits=limits) == (400, "context_length_exceeded")
    assert completion([range(1, 32)], limits=limits).choices[0].max_tokens == 1


def test_ids_are_checked_after_tokenising_too():
    assert code(chat, [1000]) == (400, "token_out_of_vocabulary")
    assert code(chat, []) == (400, "empty_prompt")
    assert code(completion, [[1], [-1]]) == (400, "token_out_of_vocabulary")


def test_choices_are_numbered_prompt_by_prompt_and_drawn_apart():
    job = completion([[1], [2, 3]], n=3)
    assert [(c.index, c.prompt, c.sampling.choice) for c in job.choices] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 0, 2),
        (3, 1, 0),
        (4, 1, 1),
        (5, 1, 2),
    ]
    assert job.prompt_tokens == 3
    assert {c.sampling.seed for c in job.choices} == {5}


@pytest.mark.parametrize(("given_seed", "resolved"), [(None, 5), (0, 0), (123, 123), (-1, (1 << 63) - 1)])
def test_the_seed_is_always_set(given_seed, resolved):
    body = json.dumps({"model": "tiny", "prompt": "x", "seed": given_seed}).encode()
    job = resolve_completion(DECODER.decode(body, CompletionRequest), [[1]], LIMITS, 5)
    assert job.choices[0].sampling.seed == resolved


def test_the_end_of_text_stops_unless_it_is_to_be_ignored():
    assert completion().choices[0].sampling.stop_token_ids == (7, 8)
    assert completion(stop_token_ids=[9, 7]).choices[0].sampling.stop_token_ids == (7, 8, 9)
    assert completion(ignore_eos=True).choices[0].sampling.stop_token_ids == ()
    assert completion(ignore_eos=True, stop_token_ids=[9]).choices[0].sampling.stop_token_ids == (9,)


def test_defaults_are_openais():
    assert chat().choices[0].sampling == Sampling(seed=5, stop_token_ids=(7, 8))


def test_each_parameter_arrives():
    job = chat(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, logit_bias={"5": -100, "3": 2.5}, allowed_token_ids=[5, 3, 5], min_tokens=2,
        logprobs=True, top_logprobs=3, stop=["a", "b"], session="s", user="u", group=1, priority=4, seed=9,
        stream=True, stream_options={"include_usage": True}, skip_special_tokens=False,
    )  # fmt: skip
    assert job.choices[0].sampling == Sampling(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=9, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, logit_bias=((3, 2.5), (5, -100.0)), allowed_token_ids=(5, 3), stop_token_ids=(7, 8),
        min_tokens=2, logprobs=3,
    )  # fmt: skip
    assert (job.stops, job.session, job.key, job.pin, job.priority) == (("a", "b"), "s", "u", 1, 4)
    assert (job.stream, job.include_usage, job.skip_special_tokens) == (True, True, False)


@pytest.mark.parametrize(("extra", "session", "key"), [
    ({"prompt_cache_key": "p", "user": "u"}, "p", "u"),
    ({"user": "u", "safety_identifier": "i"}, "u", "i"),
    ({}, "", ""),
])  # fmt: skip
def test_affinity_and_fairness_have_their_keys(extra, session, key):
    job = chat(**extra)
    assert (job.session, job.key) == (session, key)


def test_top_k_has_two_ways_to_be_off():
    assert completion(top_k=-1).choices[0].sampling.top_k == completion(top_k=0).choices[0].sampling.top_k == 0


def test_logprobs_in_both_forms():
    assert chat(logprobs=True).choices[0].sampling.logprobs == 0
    assert chat(logprobs=False).choices[0].sampling.logprobs == -1
    assert completion(logprobs=0).choices[0].sampling.logprobs == 0
    assert completion(logprobs=5).choices[0].sampling.logprobs == 5


def test_more_tokens_than_may_come_cannot_be_asked_for():
    assert code(chat, max_tokens=2, min_tokens=3) == (400, None)


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.integers(-1, (1 << 31) - 1),
            "min_p": st.floats(0, 1),
            "seed": st.integers(-(1 << 63), (1 << 63) - 1),
            "repetition_penalty": st.floats(0.01, 100),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "logit_bias": st.dictionaries(st.integers(0, 999).map(str), st.floats(-100, 100), max_size=20),
            "stop_token_ids": st.lists(st.integers(0, 999), max_size=128),
            "allowed_token_ids": st.lists(st.integers(0, 999), min_size=1, max_size=100),
            "n": st.integers(1, 20),
            "max_tokens": st.integers(1, 60),
            "priority": st.integers(-1000, 1000),
            "session": st.text(max_size=128),
            "user": st.text(st.characters(exclude_categories=["Cs"]), max_size=128),
            "logprobs": st.integers(0, 20),
            "group": st.integers(0, 1),
        },
    )
)
def test_whatever_passes_the_checks_passes_the_routers_decoder(extra):
    """No legal request can be a message that the mesh refuses."""
    job = completion(**json.loads(json.dumps(extra)))
    router = Decoder(*CARRIES[LinkKind.SUBMIT])
    for choice in job.choices:
        submit = Submit(
            request="r", attempt=0, gateway=0, prompt=job.prompts[choice.prompt], sampling=choice.sampling,
            max_tokens=choice.max_tokens, key=job.key, session=job.session, pin=job.pin, priority=job.priority,
        )  # fmt: skip
        assert router.decode([bytes(frame) for frame in encode(submit)]) == submit
