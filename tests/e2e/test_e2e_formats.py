"""Outputs that must have a form, from a real model through real HTTP: whatever it would rather say, the form holds."""

import json
import re
from typing import Annotated, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
from e2e_clients import CHAT, COMPLETIONS, MODEL, PATIENCE_S, body, posting, text_of, together, words

ALONE = pytest.mark.parametrize("served", ["tp1 unified"], indirect=True)
COUPLED = pytest.mark.parametrize("served", ["tp2-dp2 split"], indirect=True)
QUESTION = "Describe the city of Paris."
PLACE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["city", "river"]},
        "founded": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["kind", "founded", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"anyOf": [{"type": "string", "pattern": "^[a-z]{2,4}$"}, {"type": "null"}]}},
}
LONGEST = 96
"""Tokens that its longest outputs have, white space and all, or more."""

FORMS = {
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}},
        lambda text: jsonschema.validate(json.loads(text), PLACE) is None,
    ),
    "regex": (
        {"guided_regex": "[A-Z][a-z]{2,8} [0-9]{4}"},
        lambda text: re.fullmatch("[A-Z][a-z]{2,8} [0-9]{4}", text),
    ),
    "choice": ({"guided_choice": ["yes", "no", "né 日本"]}, lambda text: text in {"yes", "no", "né 日本"}),
    "lark": (
        {"guided_grammar": 'start: "<" NAME ("," NAME){0,2} ">"\nNAME: /[a-z]{1,5}/'},
        lambda text: re.fullmatch("<[a-z]{1,5}(,[a-z]{1,5}){0,2}>", text),
    ),
    "gbnf": (
        {"structured_outputs": {"grammar": 'root ::= sum\nsum ::= [0-9] | "(" sum "+" [0-9] ")"'}},
        lambda text: re.fullmatch(r"\(*[0-9](\+[0-9]\))*", text) and text.count("(") == text.count(")"),
    ),
}


class Animal(pydantic.BaseModel):
    """What the client's own types make of it."""

    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=30)
    owner: Annotated[str, pydantic.Field(max_length=6)] | None


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as found:
        yield found


@pytest.mark.parametrize(
    ("form", "served"),
    [
        ("schema", "tp2 split"),
        ("schema", "tp2-dp2 split"),
        *((form, "tp1 unified") for form in FORMS if form != "schema"),
    ],
    indirect=["served"],
)
def test_every_output_has_the_form(served, traces, form):
    """Greedy and hot, several choices, streamed or whole, on both endpoints; the tokens' end is the form's end."""
    fields, fits = FORMS[form]
    asked = [
        {"path": CHAT, "temperature": 0, "stream": True},
        {"path": CHAT, "temperature": 1, "seed": 1, "n": 2},
        {"path": COMPLETIONS, "temperature": 2, "seed": 2, "stream": True, "ignore_eos": False},
    ]
    answers = together(served, [posting(text=QUESTION, max_tokens=LONGEST, **each, **fields) for each in asked])
    for each, answer in zip(asked, answers, strict=True):
        for index in range(each.get("n", 1)):
            text, reason = text_of(answer, index), reason_of(answer, index)
            assert reason in {"stop", "length"}
            assert reason == "length" or fits(text), text
    finished = [reason_of(answer, 0) for answer in answers]
    assert finished.count("stop") >= (3 if form != "gbnf" else 1), finished


def reason_of(answer, index):
    choices = answer["choices"] if isinstance(answer, dict) else [each for event in answer for each in event["choices"]]
    return next(each["finish_reason"] for each in choices if each["index"] == index and each["finish_reason"])


@ALONE
def test_the_clients_own_types_come_back(client):
    messages = [{"role": "user", "content": "Tell me about a cat."}]
    for temperature in (0, 1):
        answer = client.chat.completions.parse(
            model=MODEL, messages=messages, response_format=Animal, max_tokens=80, temperature=temperature, seed=5
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.parsed.kind in {"cat", "dog"}
        assert Animal.model_validate_json(choice.message.content) == choice.message.parsed


@ALONE
def test_a_stream_of_any_object_says_the_same_as_one_answer(served, client):
    wanted = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "One small JSON object, please."}],
        "response_format": {"type": "json_object"},
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.chat.completions.create(**wanted).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**wanted, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason
    assert whole.message.content.startswith("{")
    if whole.finish_reason == "stop":
        assert isinstance(json.loads(whole.message.content), dict)


@COUPLED
@pytest.mark.parametrize("group", [0, 1])
def test_one_group_has_a_schema_while_the_other_idles(served, traces, group):
    fields, fits = FORMS["schema"]
    (answer,) = together(served, [posting(CHAT, text=QUESTION, group=group, max_tokens=LONGEST, **fields)])
    assert fits(text_of(answer))
    traces.settle()
    assert set(traces.groups().values()) >= {group}


@ALONE
def test_a_cached_prefix_and_an_output_cut_short(served, traces):
    prompt, (fields, fits) = words(150, 77), FORMS["schema"]
    once, again, cut = (
        together(served, [posting(text=prompt, group=0, max_tokens=tokens, **fields)])[0]
        for tokens in (LONGEST, LONGEST, 5)
    )
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert text_of(once) == text_of(again)
    assert fits(text_of(once))
    assert (reason_of(cut, 0), cut["usage"]["completion_tokens"]) == ("length", 5)
    assert text_of(once).startswith(text_of(cut))


@ALONE
def test_neighbours_of_constrained_and_hostile_requests_notice_nothing(served, traces):
    alone = [together(served, [posting(text=f"{n} is", max_tokens=12)])[0] for n in range(4)]
    hostile = [
        {"guided_json": {"type": "integer", "multipleOf": 1000003}},
        {"guided_json": {"not": {}}},
        {"guided_regex": "(a{1000}){1000}"},
        {"guided_grammar": 'start: "a"{1000000}'},
    ]
    # A fast machine works this one out in time.
    heavy = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "x" * 100_000}}}

    def refused(fields):
        async def call(client):
            answer = await client.post(COMPLETIONS, json=body(**fields))
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] in {"invalid_schema", "invalid_grammar"}

        return call

    fields, fits = FORMS["schema"]
    calls = [posting(text=f"{n} is", max_tokens=12, stream=bool(n % 2)) for n in range(4)]
    calls += [posting(CHAT, text=QUESTION, max_tokens=LONGEST, **fields)]
    calls += [lambda client: client.post(COMPLETIONS, json=body(response_format=heavy))]
    found = together(served, [*calls, *map(refused, hostile)])
    assert [text_of(answer) for answer in found[:4]] == [text_of(answer) for answer in alone]
    assert fits(text_of(found[4]))
    assert found[5].status_code in {200, 400}, found[5].text


@ALONE
def test_two_constraints_are_a_400_that_names_both(served):
    asked = body(CHAT, response_format={"type": "json_object"}, guided_regex="a")
    answer = httpx.post(served.url + CHAT, json=asked, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert "`response_format` and `guided_regex`" in answer.json()["error"]["message"]
