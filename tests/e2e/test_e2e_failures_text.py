"""Failures that users of such servers met, tried where the model's own words matter: two coupled groups of the demo model."""

import asyncio
import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2e_clients import CHAT, COMPLETIONS, PATIENCE_S, body, events_of, posting, raw, text_of, together

pytestmark = pytest.mark.parametrize("served", ["tp2-dp2 split"], indirect=True)

VOCABULARY = 49152
SAID = (
    "The river was wide and",
    "My grandmother used to say that",
    "def area(radius):\n",
    "In the year 1850, the city of",
)


@pytest.fixture
def post(served):
    with httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client:
        yield lambda path=COMPLETIONS, **fields: client.post(path, json=body(path, **fields))


def test_neighbours_of_bad_ids_and_lost_clients_say_what_they_say_alone(served, traces):
    wanted = [{"text": text, "max_tokens": 16} for text in SAID]
    alone = [text_of(together(served, [posting(**fields)])[0]) for fields in wanted]
    bad = [
        {field: value, "stream": stream}
        for field, value in (
            ("prompt", [-1]),
            ("prompt", [VOCABULARY]),
            ("prompt", [1, 2, 1 << 31]),
            ("stop_token_ids", [VOCABULARY]),
            ("logit_bias", {str(VOCABULARY): 5}),
            ("allowed_token_ids", [VOCABULARY]),
        )
        for stream in (True, False)
    ]
    refused = []

    async def hostile(client):
        for fields in bad * 3:
            response = await client.post(COMPLETIONS, json=body(**fields))
            refused.append((response.status_code, response.json()["error"]["code"]))

    async def leaving(_client):
        for number in range(8):
            with await asyncio.to_thread(raw, served, text=f"{number} ways to leave", max_tokens=400, n=2):
                await asyncio.sleep(0.03 * number)  # the moment at which this client has had enough

    calls = [posting(**fields, stream=bool(number % 2)) for number, fields in enumerate(wanted)]
    *answers, _, _ = together(served, [*calls, hostile, leaving])
    assert [text_of(answer) for answer in answers] == alone
    assert refused == [(400, "token_out_of_vocabulary")] * len(bad) * 3


def test_stop_strings_at_every_place_are_cut_and_false_starts_are_sent_on(served, traces):
    asked = {"text": "One, two, three, four, five, six,", "max_tokens": 16, "stream": True}
    free = posting(**asked | {"stream": False, "logprobs": 0})
    choice = together(served, [free])[0]["choices"][0]
    text, borders = (
        choice["text"],
        [offset - choice["logprobs"]["text_offset"][0] for offset in choice["logprobs"]["text_offset"]],
    )
    # Each stop begins inside one token and ends inside a later one.
    stops = [text[border - 1 : border + 2] for border in borders[2:14:3]]
    # It would begin there, but the text goes another way.
    false = [text[border - 1 : border + 2] + "\x01" for border in borders[2:14:3]]
    calls = [posting(**asked, stop=stop) for stop in stops] + [posting(**asked, stop=false)]
    *cut, whole = together(served, calls)
    for stop, events in zip(stops, cut, strict=True):
        assert text_of(events) == text[: text.index(stop)], f"{stop!r}: {text_of(events)!r} of {text!r}"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert text_of(whole) == text
    assert whole[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_alone_says_the_prompt_with_its_logprobs_where_they_are_asked_for(post, stream):
    said = post(text="Say this.", echo=True, max_tokens=0, stream=stream)
    assert said.status_code == 200, said.text
    assert text_of(events_of(said.text) if stream else said.json()) == "Say this."
    scored = post(text="Say this.", echo=True, max_tokens=0, logprobs=1, stream=stream)
    assert scored.status_code == 200, scored.text
    answer = events_of(scored.text) if stream else scored.json()
    assert text_of(answer) == "Say this."
    columns = (answer[0] if stream else answer)["choices"][0]["logprobs"]
    assert "".join(columns["tokens"]) == "Say this."
    assert columns["token_logprobs"][0] is None
    assert all(value < 0 for value in columns["token_logprobs"][1:])
    bare = post(text="Say this.", max_tokens=0, stream=stream)
    assert (bare.status_code, bare.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_null_for_every_optional_parameter_is_as_good_as_none(post, path):
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stream",
        "seed",
        "logprobs",
        "logit_bias",
        "group",
        "user",
    )
    answer = post(path, text="The capital of France is", **dict.fromkeys(names), stop=["."], ignore_eos=None)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0


def test_messages_without_words_are_answered_and_no_message_is_refused(post):
    assert post(CHAT, text="").status_code == 200
    assert post(CHAT, messages=[]).status_code == 400
    assert post(CHAT, messages=[{"role": "user"}]).status_code in {200, 400}


@pytest.mark.parametrize("count", [64, pytest.param(2000, marks=pytest.mark.full)])
def test_bytes_that_never_become_a_character_cost_the_same_each(served, traces, post, count):
    ids = asked(served, "tokenize", prompt="\U0001f9a9")["tokens"]
    lone = next(each for each in ids if "\ufffd" in detokenized(served, [each]))
    answer = post(text="Hm", max_tokens=count, allowed_token_ids=[lone]).json()
    assert answer["usage"]["completion_tokens"] == count
    assert text_of(answer) == detokenized(served, [lone] * count)
    traces.settle()
    (sent,) = (e for e in traces.events("request.sent", actors="gateway-*") if e["request"] == answer["id"])
    # A gateway that is put aside meanwhile loses some milliseconds each time, which count for little among many tokens.
    assert count < 1000 or sent["ns"] / count < 500_000, "microseconds of gateway time for each token"


def detokenized(served, tokens):
    return asked(served, "detokenize", tokens=tokens)["prompt"]


def asked(served, path, **fields):
    return httpx.post(f"{served.url}/{path}", json=fields, timeout=PATIENCE_S).json()


@pytest.mark.parametrize("length", [1000, pytest.param(6000, marks=pytest.mark.full)])
def test_health_is_well_during_the_longest_prefill(served, traces, length):
    ids = list(itertools.islice(itertools.cycle(range(1000, 9000, 7)), length))
    polled = []
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client:
        start = time.monotonic()
        prefill = pool.submit(httpx.post, served.url + COMPLETIONS, json=body(prompt=ids, max_tokens=2), timeout=300)
        while not prefill.done():
            asked_at = time.monotonic()
            assert client.get("/health").status_code == 200
            polled.append(time.monotonic() - asked_at)
        took = time.monotonic() - start
    assert prefill.result().status_code == 200, prefill.result().text
    # One that waited for the prefill would take most of its time.
    assert statistics.median(polled) < took / 5, (took, polled)


def test_an_answer_can_be_as_long_as_the_pool_but_a_longer_one_is_refused(post):
    room = post(max_tokens=1 << 20)
    assert (room.status_code, room.json()["error"]["code"]) == (400, "context_length_exceeded")
