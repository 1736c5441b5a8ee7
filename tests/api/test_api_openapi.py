"""The OpenAPI document is valid, complete, and says what the code does."""

import json
import re

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from edgemesh.api.check import check_chat, check_completion, check_tokenize
from edgemesh.api.chunks import ChatCompletionChunk, CompletionChunk
from edgemesh.api.decode import BodyDecoder
from edgemesh.api.errors import ApiError
from edgemesh.api.extras import with_prompt, with_token_ids, with_usage
from edgemesh.api.limits import Limits
from edgemesh.api.openai import NEUTRAL, ChatRequest, CompletionRequest, TokenizeRequest
from edgemesh.api.openapi import document
from edgemesh.api.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob, usage
from edgemesh.api.routes import ROUTES
from edgemesh.api.sse import ChatChunks, CompletionChunks, Ending, Head, usage_frame
from edgemesh.cli.main import application

BASE = "https://edgemesh.invalid/openapi.json"


@pytest.fixture(scope="module")
def written():
    """The document as a reader of the file gets it."""
    return json.loads(json.dumps(document()))


@pytest.fixture(scope="module")
def takes(written):
    """``takes(name, value)``: whether the document's schema of that name allows the value."""
    registry = Registry().with_resource(BASE, Resource.from_contents(written, default_specification=DRAFT202012))

    def check(name, value):
        schema = {"$ref": f"{BASE}#/components/schemas/{name}"}
        return jsonschema.Draft202012Validator(schema, registry=registry).is_valid(value)

    return check


@pytest.mark.parametrize("keyed", [None, True, False])
def test_the_document_is_valid(keyed):
    OpenAPIV31SpecValidator(document(keyed=keyed)).validate()


def test_every_route_is_an_operation_and_nothing_else_is(written):
    described = {
        (path, method.upper(), operation["operationId"])
        for path, methods in written["paths"].items()
        for method, operation in methods.items()
    }
    assert described == {(re.sub(r":\w+}", "}", each.path), each.method, each.name) for each in ROUTES}
    assert len({each.name for each in ROUTES}) == len(ROUTES)


def test_keys_are_asked_for_where_they_are_set():
    def security(keyed):
        paths = document(keyed=keyed)["paths"]
        return paths["/v1/chat/completions"]["post"]["security"], paths["/health"]["get"]["security"]

    assert security(keyed=True) == ([{"bearer": []}, {"key": []}], [])
    assert security(keyed=False) == ([], [])
    assert security(keyed=None) == ([{"bearer": []}, {"key": []}, {}], [])


def test_every_refusal_has_its_status_and_body(written):
    for methods in written["paths"].values():
        for operation in methods.values():
            answers = operation["responses"]
            assert {"200", "500"} <= answers.keys()
            assert ("401" in answers) == bool(operation["security"])
            for status in answers.keys() & {"429", "503"}:
                named = answers[status]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                assert named == "Healthy" or answers[status]["headers"]["Retry-After"]["required"]


LIMITS = Limits(model="m", context=4096, vocab_size=1000, eos_token_ids=(0,), groups=2)
CHECK = {ChatRequest: check_chat, CompletionRequest: check_completion, TokenizeRequest: check_tokenize}
BODIES = [
    (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    (CompletionRequest, {"model": "m", "prompt": "x"}),
    (TokenizeRequest, {"prompt": "x"}),
]
CHANGES = [
    {},
    {"n": 0},
    {"n": None},
    {"n": "1"},
    {"temperature": 2},
    {"temperature": 2.5},
    {"logit_bias": {"12": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"12": 101}},
    {"stop": ["a", ""]},
    {"stop": []},
    {"stream_options": {"include_usage": True}, "stream": True},
    {"stream_options": {"include": True}, "stream": True},
    {"nonsense": 1},
    {"prompt": ["a", 1]},
    {"prompt": [[1, 2], [3]]},
    {"stop": [""]},
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
    {"messages": [{"role": "nobody", "content": "x"}]},
]


@pytest.mark.parametrize(("kind", "base"), BODIES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_document_and_the_code_agree(takes, kind, base, change):
    body = base | change
    try:
        CHECK[kind](BodyDecoder().decode(json.dumps(body).encode(), kind), LIMITS)
        decoded = True
    except ApiError:
        decoded = False
    assert takes(kind.__name__, body) == decoded


@pytest.mark.parametrize(("kind", "base"), BODIES[:2])
def test_what_is_not_supported_is_named_with_the_values_that_ask_for_nothing(takes, kind, base):
    assert NEUTRAL[kind.__name__]
    for name, (values, _) in NEUTRAL[kind.__name__].items():
        for value in (None, *values):
            assert takes(kind.__name__, base | {name: value}), name
        assert not takes(kind.__name__, base | {name: {"asks": "for something"}}), name


TOP = TopLogprob(token="a", logprob=-1.0, bytes=[97])
USAGE = usage(3, 2, 1)


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize(
    ("chunks", "kind", "logprobs"),
    [
        (
            ChatChunks,
            ChatCompletionChunk,
            ChatLogprobs(content=[TokenLogprob(token="a", logprob=-1.0, bytes=[97], top_logprobs=[TOP])]),
        ),
        (
            CompletionChunks,
            CompletionChunk,
            CompletionLogprobs(tokens=["a"], token_logprobs=[-1.0], top_logprobs=[{"a": -1.0}], text_offset=[0]),
        ),
    ],
)
def test_every_event_of_a_stream_is_what_the_document_says(takes, chunks, kind, logprobs, include_usage):
    chat = kind is ChatCompletionChunk
    head = Head("id-1", "chat.completion.chunk" if chat else "text_completion", 1, "m")
    tiered = msgspec.structs.replace(head, service_tier="default") if chat else head
    made = chunks(tiered, 1, include_usage=include_usage)
    said = [made.text("é\n"), made.text("x", logprobs)]
    ends = [made.last(Ending("stop")), made.last(Ending("stop", stop='"}')), made.last(Ending("stop", token=2))]
    events = [*said, *(with_token_ids(event, [3, 4]) for event in (*said, *ends)), *ends, usage_frame(head, USAGE)]
    for first in filter(None, (made.first(), said[0])):
        events += [first, with_prompt(first, b"[1,2]", chat=chat)]
    if include_usage:
        events.append(with_usage(made.text("x"), USAGE))
    for event in events:
        content = event.removeprefix(b"data: ").rstrip()
        assert takes(kind.__name__, json.loads(content))
        assert json.loads(msgspec.json.encode(msgspec.json.decode(content, type=kind))) == json.loads(content)


def test_the_command_prints_and_writes_it(tmp_path, capsys, written):
    arguments = ["api", "openapi"]
    application(arguments)(arguments, standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == written
    arguments += ["--write", str(tmp_path)]
    application(arguments)(arguments, standalone_mode=False)
    assert json.loads((tmp_path / "openapi.json").read_text()) == written
