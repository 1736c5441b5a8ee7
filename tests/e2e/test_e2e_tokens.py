"""Greedy tokens are those of `transformers` in every mode, whatever else varies: cache hits, chunks, streaming."""

import concurrent.futures

import openai
import pytest
from e2e_clients import PATIENCE_S
from e2e_reference import OUTPUT

QUICK = ["tp1 unified", "tp2 split", "plain-dp2 split", "tp2-dp2 split", "tp4-dp2 unified", "tp8-dp2 split"]
REST = ["tp1 split", "tp2 unified", "plain-dp2 unified", "tp2-dp2 unified", "tp4-dp2 split", "tp8-dp2 unified"]
MODES = [*QUICK, *(pytest.param(mode, marks=pytest.mark.full) for mode in REST)]


def ask(client, prompt, *, stream):
    """(text, prompt tokens, output tokens, cached tokens, finish reason) of one completion."""
    wanted = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0}
    extra = {"extra_body": {"ignore_eos": True}}
    if stream:
        chunks = list(client.completions.create(**wanted, **extra, stream=True, stream_options={"include_usage": True}))
        choices = [choice for chunk in chunks for choice in chunk.choices]
        text, finish, usage = "".join(each.text for each in choices), choices[-1].finish_reason, chunks[-1].usage
    else:
        whole = client.completions.create(**wanted, **extra)
        text, finish, usage = whole.choices[0].text, whole.choices[0].finish_reason, whole.usage
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details is not None else 0
    return text, usage.prompt_tokens, usage.completion_tokens, cached, finish


def batch(served, requests):
    """All at once; a request is (prompt, stream)."""
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=2 * PATIENCE_S) as client,
        concurrent.futures.ThreadPoolExecutor(len(requests)) as pool,
    ):
        return list(pool.map(lambda request: ask(client, request[0], stream=request[1]), requests))


@pytest.mark.parametrize("served", MODES, indirect=True)
def test_greedy_tokens_are_those_of_transformers(served, cases, traces):
    # A near tie would make this a test of rounding.
    assert min(case.margin for case in cases) > 1e-3
    # Ids and text, streamed or not; then the other way round, with what the first round left in the prefix cache.
    first = [(case.ids if index % 2 else case.text, index % 3 != 0) for index, case in enumerate(cases)]
    second = [(case.text if index % 2 else case.ids, index % 3 == 0) for index, case in enumerate(cases)]
    cached = []
    for requests in (first, second):
        for case, answer in zip(cases, batch(served, requests), strict=True):
            text, prompt_tokens, output_tokens, hit, finish = answer
            assert text == case.said
            assert (prompt_tokens, output_tokens, finish) == (len(case.ids), OUTPUT, "length")
            cached.append(hit)
    assert not any(cached[: len(cases)])
    assert cached[-1] > 0, "the longest prompt's second time must hit the prefix cache"
    traces.settle()
    the_mode_did_what_it_is_named_for(served, cases, traces)


def the_mode_did_what_it_is_named_for(served, cases, traces):
    """The trace of what the loads made: requests shared decode steps, long prompts came in chunks, all groups had some."""
    plans = [plan for plan in traces.events("tick.plan", actors="group-*") if not plan["idle"]]
    planes = {"mixed"} if any("mixed" in name for name in served.actors()) else {"prefill", "decode"}
    assert {plan["plane"] for plan in plans} == planes
    groups = {int(name.removeprefix("group-")) for name in served.actors() if name.startswith("group-")}
    assert max(plan["sequences"] for plan in plans if plan["plane"] != "prefill") > 1, "requests share decode steps"
    long = max(len(case.ids) for case in cases)
    assert all(plan["tokens"] < long for plan in plans), "the longest prompt is read in chunks"
    assert set(traces.groups().values()) == groups, "every group gets requests"
