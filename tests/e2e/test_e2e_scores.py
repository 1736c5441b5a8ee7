"""Log-probabilities of prompts are those of `transformers`: echoed, in vLLM's form, in chunks, beside others, whatever is cached."""

import httpx
import pytest
from e2e_clients import CHAT, COMPLETIONS, body, events_of, posting, text_of, together

pytestmark = pytest.mark.parametrize("served", ["tp2-dp2 split"], indirect=True)

LIMIT = 3e-4
"""Of the largest difference between two float32 implementations of thirty layers: ten times what was seen."""


@pytest.fixture
def post(served):
    with httpx.Client(base_url=served.url, timeout=120) as client:

        def post(path=COMPLETIONS, **fields):
            response = client.post(path, json=body(path, **fields))
            assert response.status_code == 200, response.text
            return events_of(response.text) if fields.get("stream") else response.json()

        yield post


def same(columns, scores, count, *, top):
    """The columns of ``count`` tokens are right."""
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    values = columns["token_logprobs"][1:count]
    assert values == pytest.approx([each.logprob for each in scores[: count - 1]], abs=LIMIT)
    for value, likely, score in zip(values, columns["top_logprobs"][1:count], scores, strict=False):
        assert top <= len(likely) <= top + 1 or "�" in "".join(likely)
        if top:
            assert max(likely.values()) == pytest.approx(max(score.logprob, score.top[0][1]), abs=LIMIT)
            assert (value == max(likely.values())) == (score.rank == 1)


def likelihood(choice, begin):
    """What lm-eval reads off an echo with one more token: the continuation's log-likelihood, and whether it is greedy."""
    values, tops = (choice["logprobs"][name][begin:-1] for name in ("token_logprobs", "top_logprobs"))
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


@pytest.mark.parametrize("length", [0, 1])
def test_a_batch_of_echoed_prompts_is_scored_as_transformers_does(post, cases, traces, length):
    prompts = [case.ids for case in cases]
    assert max(map(len, prompts)) > 2 * 96
    answer = post(prompt=prompts, echo=True, logprobs=1, max_tokens=length, seed=1234)
    for choice, case in zip(answer["choices"], cases, strict=True):
        columns, count = choice["logprobs"], len(case.ids)
        assert {len(each) for each in columns.values()} == {count + length}
        assert choice["text"] == case.text + text_of(post(prompt=case.ids, max_tokens=1)) * length
        assert "".join(columns["tokens"]) == choice["text"]
        same(columns, case.scores, count, top=1)
        assert [choice["text"][start:].startswith(token) for token, start in zip(*columns_of(columns), strict=True)]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == length * len(prompts)


def columns_of(columns):
    return columns["tokens"], columns["text_offset"]


def test_the_likelihood_of_a_continuation_and_whether_it_is_greedy(post, cases):
    asked, wanted = [], []
    for case in cases:
        begin, right = len(case.ids), case.output[:12]
        asked += [case.ids + right, [*case.ids, *right[:7], case.ids[0], *right[8:]]]
        wanted.append((begin, sum(each.logprob for each in case.scores[begin - 1 : begin + 11])))
    choices = post(prompt=asked, echo=True, logprobs=1, max_tokens=1)["choices"]
    for number, (begin, total) in enumerate(wanted):
        said, greedy = likelihood(choices[2 * number], begin)
        assert said == pytest.approx(total, abs=12 * LIMIT)
        assert greedy
        other, greedy = likelihood(choices[2 * number + 1], begin)
        assert other < said
        assert not greedy


def test_vllms_form_has_ranks_and_alternatives_for_every_choice(post, cases):
    case = cases[3]
    answer = post(prompt=case.text, prompt_logprobs=5, n=2, temperature=1, max_tokens=2)
    tables = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert tables[0] == tables[1]
    assert tables[0][0] is None
    assert len(tables[0]) == len(case.ids)
    for row, token, score in zip(tables[0][1:], case.ids[1:], case.scores, strict=False):
        own = row[str(token)]
        assert own["logprob"] == pytest.approx(score.logprob, abs=LIMIT)
        assert own["rank"] == score.rank or score.rank > 20
        best = [each for each, _ in score.top[:5]]
        assert set(row) == {str(token), *map(str, best)} or any(
            abs(score.top[4][1] - value) < LIMIT for _, value in score.top[5:6]
        )
    chat = post(CHAT, text="Hello", prompt_logprobs=0, max_tokens=1)
    assert chat["prompt_logprobs"][0] is None
    assert [len(row) for row in chat["prompt_logprobs"][1:]] == [1] * (chat["usage"]["prompt_tokens"] - 1)


def test_a_stream_says_the_same_echo_first(post, cases):
    fields = {"prompt": [cases[2].ids, cases[0].ids], "echo": True, "logprobs": 2, "max_tokens": 6, "n": 2}
    whole, stream = post(**fields), post(**fields, stream=True)
    for index in range(4):
        mine = [each for event in stream for each in event["choices"] if each["index"] == index]
        assert mine[0]["text"] == cases[(2, 0)[index // 2]].text
        assert text_of(stream, index) == text_of(whole, index)
        for name, column in whole["choices"][index]["logprobs"].items():
            streamed = [value for each in mine for value in (each["logprobs"] or {}).get(name, [])]
            if name == "token_logprobs":
                assert streamed[1:] == pytest.approx(column[1:], abs=LIMIT)
            elif name != "top_logprobs":
                assert streamed == column


def test_what_is_cached_is_scored_anew_and_what_is_scored_is_cached(post, cases, traces):
    case = cases[4]
    post(prompt=case.ids, max_tokens=1, group=0)
    scored = post(prompt=case.ids, echo=True, logprobs=0, max_tokens=0, group=0)
    same(scored["choices"][0]["logprobs"], case.scores, len(case.ids), top=0)
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert post(prompt=case.ids, max_tokens=1, group=0)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    fresh = [*case.ids[7:], *case.ids[:7]]
    post(prompt=fresh, prompt_logprobs=20, max_tokens=0, group=1)
    assert post(prompt=fresh, max_tokens=1, group=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_scored_prompts_and_their_neighbours_do_not_change_each_other(served, cases, traces):
    scoring = [
        posting(prompt=[case.ids for case in cases], echo=True, logprobs=1, max_tokens=number % 2)
        for number in range(2)
    ]
    saying = [posting(prompt=case.ids, max_tokens=12, stream=bool(number % 2)) for number, case in enumerate(cases)] * 2
    answers = together(served, [*scoring, *saying], timeout=120)
    for answer in answers[: len(scoring)]:
        for choice, case in zip(answer["choices"], cases, strict=True):
            same(choice["logprobs"], case.scores, len(case.ids), top=1)
    for answer, case in zip(answers[len(scoring) :], cases * 2, strict=True):
        assert case.said.startswith(text_of(answer))
