"""Every answer, whole or streamed, is exactly what the installed `openai` package's own types say: strictly read, nothing
beside them."""

import json

import httpx
import pydantic
import pytest
from e2e_clients import CHAT, COMPLETIONS, MODEL, PATIENCE_S, body, events_of
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

pytestmark = pytest.mark.parametrize("served", ["null-dp4 split"], indirect=True)

BESIDE = {"max_model_len", "stop_reason"}
"""What other servers of open models tell as well, and their clients read."""


def beside(value, path=""):
    """The names of what a parsed answer holds that its type does not know, at any depth."""
    if isinstance(value, pydantic.BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or () if name not in BESIDE)
        for name in type(value).model_fields:
            yield from beside(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for each in value:
            yield from beside(each, path)


def strictly(kind, answer):
    found = kind.model_validate_json(json.dumps(answer), strict=True)
    assert not list(beside(found))
    return found


def post(served, path, **fields):
    answer = httpx.post(served.url + path, json=body(path, **fields), timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text) if fields.get("stream") else answer.json()


CHATS = [
    {},
    {"n": 2},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3, "n": 2},
    {"stop": ["."], "ignore_eos": False},
]


@pytest.mark.parametrize("fields", CHATS)
def test_chats(served, fields):
    found = strictly(ChatCompletion, post(served, CHAT, **fields))
    assert [choice.index for choice in found.choices] == list(range(fields.get("n", 1)))
    assert all((choice.logprobs is not None) == ("logprobs" in fields) for choice in found.choices)


@pytest.mark.parametrize("fields", [*CHATS, {"stream_options": {"include_usage": True}}])
def test_streamed_chats(served, fields):
    chunks = [strictly(ChatCompletionChunk, event) for event in post(served, CHAT, stream=True, **fields)]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == ("stream_options" in fields)
    for index in range(fields.get("n", 1)):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
        assert choices[-1].finish_reason in {"stop", "length"}
        assert all(choice.finish_reason is None for choice in choices[:-1])


TEXTS = [{}, {"n": 2}, {"logprobs": 2}, {"echo": True}, {"stop": ["."], "ignore_eos": False}]


@pytest.mark.parametrize("fields", TEXTS)
def test_completions(served, fields):
    found = strictly(Completion, post(served, COMPLETIONS, **fields))
    assert [choice.index for choice in found.choices] == list(range(fields.get("n", 1)))


@pytest.mark.parametrize("fields", [*TEXTS, {"stream_options": {"include_usage": True}}])
def test_streamed_completions(served, fields):
    events = post(served, COMPLETIONS, stream=True, **fields)
    for event in events:
        for choice in event["choices"]:
            # A stream's choice has no reason before its end, though the package's type is that of a whole answer.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        strictly(Completion, event)
    assert len([event for event in events if event.get("usage")]) == ("stream_options" in fields)


def test_models(served):
    listed = httpx.get(f"{served.url}/v1/models", timeout=PATIENCE_S).json()
    assert listed.keys() == {"object", "data"}
    assert [strictly(Model, each).id for each in listed["data"]] == [MODEL]
    one = httpx.get(f"{served.url}/v1/models/{MODEL}", timeout=PATIENCE_S).json()
    assert strictly(Model, one).id == MODEL


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [(CHAT, {"temperature": 3}, 400), (COMPLETIONS, {"model": "nobody"}, 404), (COMPLETIONS, {"nonsense": 1}, 400)],
)
def test_errors(served, path, fields, status):
    answer = httpx.post(served.url + path, json=body(path, **fields), timeout=PATIENCE_S)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == next(iter(fields))
    assert isinstance(error["code"], str)
