"""The real `openai` client against a real mesh: streaming or not, many at once, and clients that go away."""

import asyncio
import contextlib

import openai
import pytest
from e2e_clients import PATIENCE_S, raw, wait_for

pytestmark = pytest.mark.parametrize("served", ["tp1 unified"], indirect=True)

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as found:
        yield found


def test_the_model_is_listed_and_answers(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_one_answer(client):
    wanted = {"model": MODEL, "messages": QUESTION, "max_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(**wanted)
    chunks = list(client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_stop_strings_end_the_text_before_them(client):
    wanted = {"model": MODEL, "prompt": "One, two, three, four, five,", "max_tokens": 24, "temperature": 0}
    free = client.completions.create(**wanted).choices[0].text
    stop = free[6:10]
    ended = client.completions.create(**wanted, stop=stop)
    assert ended.choices[0].text == free[: free.index(stop)]
    assert ended.choices[0].finish_reason == "stop"


def test_seeded_sampling_repeats_and_choices_differ(client):
    wanted = {
        "model": MODEL,
        "prompt": "My favourite animal is",
        "max_tokens": 16,
        "temperature": 1.0,
        "seed": 7,
        "n": 3,
    }
    once, again = (client.completions.create(**wanted) for _ in range(2))
    texts = [choice.text for choice in sorted(once.choices, key=lambda choice: choice.index)]
    assert texts == [choice.text for choice in sorted(again.choices, key=lambda choice: choice.index)]
    assert len(set(texts)) > 1


def test_sixty_four_at_once_all_get_their_own_answer(served):
    async def one(client, number):
        wanted = {"model": MODEL, "prompt": f"{number} plus one is", "max_tokens": 8, "temperature": 0}
        if number % 2:
            return (await client.completions.create(**wanted)).choices[0].text
        stream = await client.completions.create(**wanted, stream=True)
        return "".join([choice.text async for chunk in stream for choice in chunk.choices])

    async def everyone():
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=300)
        async with client:
            together = await asyncio.gather(*(one(client, number) for number in range(64)))
            alone = [await one(client, number) for number in (3, 4, 61)]
        return together, alone

    together, alone = asyncio.run(everyone())
    assert len(together) == 64
    assert [together[number] for number in (3, 4, 61)] == alone


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_what_it_held(served, traces, stream):
    asked = {"text": "Tell me a long story.", "max_tokens": 5000, "stream": stream, "n": 2}
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(raw(served, **asked))
        wait_for(lambda: len(traces.groups()) == 8, "not all are placed")
    traces.settle()
    assert {event["request"] for event in traces.events("request.aborted", actors="group-*")} == set(traces.groups())
    assert len(list(traces.events("request.aborted", actors="gateway-*"))) == 4


BAD = [
    ({"prompt": [49152 * 2]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "word " * 9000}, "context_length_exceeded"),
    ({"prompt": "x", "max_tokens": 0, "logit_bias": {"900000": 1}}, "logit_bias"),
]


def test_a_bad_request_is_refused_and_its_neighbours_go_on(served, client):
    good = {"model": MODEL, "prompt": "The sun is", "max_tokens": 24, "temperature": 0}
    before = client.completions.create(**good).choices[0].text
    with client.completions.create(**good, stream=True) as stream:
        for fields, named in BAD:
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(**({"model": MODEL} | fields))
            assert named in str(refused.value.body)
        assert "".join(choice.text for chunk in stream for choice in chunk.choices) == before
    assert served.health()[0] == 200


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")
