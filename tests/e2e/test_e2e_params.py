"""What parameters do to the text of a real model, asked for with the `openai` client."""

import httpx
import openai
import pytest
from e2e_clients import MODEL, PATIENCE_S

pytestmark = pytest.mark.parametrize("served", ["tp1 unified"], indirect=True)

COUNT = "One, two, three, four, five,"
QUESTION = {"role": "user", "content": "What is the capital of France?"}
OPENAI = {"max_tokens", "n", "stop", "logprobs", "seed", "temperature", "echo", "logit_bias", "best_of"}


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


@pytest.fixture
def tokenize(served):
    def call(text):
        asked = {"prompt": text}
        return httpx.post(f"{served.url}/tokenize", json=asked, timeout=PATIENCE_S).json()["tokens"]

    return call


def complete(client, prompt=COUNT, **fields):
    """A greedy completion; what is not OpenAI's goes as it is."""
    named = {"max_tokens": 8, "temperature": 0} | {key: value for key, value in fields.items() if key in OPENAI}
    extra = {key: value for key, value in fields.items() if key not in OPENAI}
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **named)


def said(client, prompt=COUNT, **fields):
    return complete(client, prompt, **fields).choices[0].text


def test_bad_words_never_come(client, tokenize):
    free = said(client)
    assert " six" in free
    assert len(tokenize(" six")) == 1
    several = " six, seven"
    assert several in free
    assert len(tokenize(several)) > 2
    for word in ("six", several.strip()):
        text = said(client, bad_words=[word])
        assert word not in text
        assert text.strip()
    # A word that is banned does not keep its beginning from coming.
    assert said(client, bad_words=["six, seven"]).startswith(" six,")
    drawn = complete(client, bad_words=["six"], n=2, temperature=1, seed=5, logprobs=2)
    assert all(" six" not in choice.text for choice in drawn.choices)
    assert said(client) == free


def test_a_stop_token_is_named_and_shown_where_asked_for(client, tokenize):
    free = said(client)
    before = free[: free.index(" seven")]
    [token] = tokenize(" seven")
    for include in (False, True):
        choice = complete(client, stop_token_ids=[token], include_stop_str_in_output=include).choices[0]
        assert choice.text == before + (" seven" if include else "")
        assert (choice.finish_reason, choice.stop_reason) == ("stop", token)
    least = len(tokenize(before)) + 1
    longer = complete(client, stop=[" six"], min_tokens=least).choices[0]
    assert (longer.text, longer.stop_reason) == (free, None)
    assert len(tokenize(said(client, stop_token_ids=[token], min_tokens=least, max_tokens=least))) >= least


def test_an_end_of_sequence_has_no_name_and_may_be_ignored(client):
    wanted = {"model": MODEL, "messages": [QUESTION], "max_tokens": 16, "temperature": 0}
    choice = client.chat.completions.create(**wanted).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    longer = client.chat.completions.create(**wanted, extra_body={"ignore_eos": True})
    assert (longer.choices[0].finish_reason, longer.usage.completion_tokens) == ("length", 16)


def test_a_truncated_prompt_says_what_its_last_tokens_say(client, tokenize):
    ids = tokenize("Red, green and blue are words of something else. " + COUNT)
    last = len(tokenize(COUNT))
    found = complete(client, ids, truncate_prompt_tokens=last, max_tokens=4)
    assert found.usage.prompt_tokens == last
    assert found.choices[0].text == said(client, ids[-last:], max_tokens=4)


def test_best_of_gives_the_likeliest_of_what_it_drew(client):
    asked = {"temperature": 1, "seed": 11, "max_tokens": 6}
    drawn = complete(client, n=4, logprobs=0, **asked).choices
    means = {each.text: sum(each.logprobs.token_logprobs) / len(each.logprobs.tokens) for each in drawn}
    best = complete(client, best_of=4, n=2, **asked)
    assert [choice.text for choice in best.choices] == sorted(means, key=means.get, reverse=True)[:2]
    assert best.usage.completion_tokens == 24


def test_a_message_is_continued(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[QUESTION, {"role": "assistant", "content": "The capital of"}],
        max_tokens=3,
        temperature=0,
        extra_body={"continue_final_message": True},
    )
    assert answer.choices[0].message.content.startswith(" France")


def test_a_bias_and_allowed_tokens_decide(client, tokenize):
    [token] = tokenize(" dog")
    assert said(client, max_tokens=3, logit_bias={str(token): 100}) == " dog" * 3
    found = said(client, allowed_token_ids=tokenize(" cat mouse"), temperature=1, seed=3)
    assert set(found.split()) <= {"cat", "mouse"}


def test_greedy_choices_are_the_same_and_so_is_a_nucleus_of_nothing(client):
    texts = {choice.text for choice in complete(client, n=3).choices}
    texts |= {said(client, temperature=1, seed=seed, top_p=0) for seed in (1, 2)}
    texts.add(said(client, temperature=1, top_k=1))
    assert len(texts) == 1
    assert len({choice.text for choice in complete(client, n=4, temperature=1.2, seed=5, top_k=-1).choices}) > 1


def test_special_tokens_are_shown_where_asked_for_and_never_with_blanks(client):
    wanted = {"model": MODEL, "messages": [QUESTION], "max_tokens": 10, "temperature": 0}
    shown = [
        client.chat.completions.create(
            **wanted,
            extra_body={"ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": blanks},
        )
        for blanks in (True, False)
    ]
    assert shown[0].choices[0].message.content == shown[1].choices[0].message.content
    assert "Paris.<|im_end|>" in shown[0].choices[0].message.content


def test_only_the_same_salt_finds_a_cached_prompt(client):
    prompt = "A prompt that nobody has sent before, long enough for some pages of the cache. " * 3
    cached = [
        complete(client, prompt, max_tokens=1, group=0, **fields).usage.prompt_tokens_details.cached_tokens
        for fields in ({}, {}, {"cache_salt": "x"}, {"cache_salt": "x"}, {"cache_salt": "y"})
    ]
    assert [bool(count) for count in cached] == [False, True, False, True, False]
