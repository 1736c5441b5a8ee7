import itertools
import json

import pytest
from api_tokenizers import byte_level
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion as OpenAIChat
from openai.types.chat import ChatCompletionChunk

from edgemesh.api.errors import context_length_exceeded, from_mesh, invalid, too_busy, unauthorised, unavailable
from edgemesh.api.events import CallArguments, CallBegin, CallEnd, Content, Reasoning, gather
from edgemesh.api.forms import ChatForm, CompletionForm, Part
from edgemesh.api.replies import Usage, usage
from edgemesh.api.sse import DONE, Ending, error_frame, frame, usage_frame
from edgemesh.wire.messages import Logprob

USAGE = usage(5, 7, 3)
STOP, LENGTH = Ending("stop"), Ending("length")
TEXTS = st.text(max_size=30)
TOKEN = byte_level().encode("the", add_special_tokens=False)[0]
ENTRIES = [Logprob(TOKEN, -0.5, ((TOKEN, -0.5),))]


def chunks_of(stream):
    """The JSON of every event; the framing itself is checked on the way."""
    assert stream.endswith(b"\n\n")
    events = stream.removesuffix(b"\n\n").split(b"\n\n")
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


@settings(max_examples=100, deadline=None)
@given(name=TEXTS, model=TEXTS, texts=st.lists(TEXTS, max_size=4), index=st.integers(0, 255), usage=st.booleans())
def test_chat_chunks_are_openais(name, model, texts, index, usage):
    form = ChatForm(byte_level().pieces)
    head = form.head(name, 123, model)
    made = form.events(head, include_usage=usage).chunks(index)
    stream = made.first() + b"".join(made.text(text) for text in texts) + made.last(Ending("length"))
    chunks = chunks_of(stream)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert (chunk["id"], chunk["model"], chunk["created"]) == (name, model, 123)
        assert ("usage" in chunk, chunk.get("usage")) == (usage, None)
        assert [choice["index"] for choice in chunk["choices"]] == [index]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [choice["delta"].get("content") for choice in choices] == ["", *texts, None]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(texts) + 1) + ["length"]


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TEXTS, max_size=4), index=st.integers(0, 255), usage=st.booleans())
def test_completion_chunks_are_openais(texts, index, usage):
    form = CompletionForm(byte_level().pieces)
    made = form.events(form.head("cmpl-1", 123, "m"), include_usage=usage).chunks(index)
    assert made.first() == b""
    chunks = chunks_of(b"".join(made.text(text) for text in texts) + made.last(Ending("stop")))
    for chunk in chunks[:-1]:
        assert (chunk["object"], chunk["choices"][0]["finish_reason"]) == ("text_completion", None)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [*texts, ""]
    OpenAICompletion.model_validate({k: v for k, v in chunks[-1].items() if k != "usage"}, strict=True)


@pytest.mark.parametrize("kind", [ChatForm, CompletionForm])
def test_logprobs_stream_in_the_form_of_the_whole_answer(kind):
    form = kind(byte_level().pieces)
    head = form.head("x", 1, "m")
    [chunk] = chunks_of(form.events(head, include_usage=False).chunks(0).text("the", form.logprobs(ENTRIES, 4)))
    whole = json.loads(form.reply(head, [Part(0, [Content("the")], STOP, ENTRIES)], USAGE))
    streamed = chunk["choices"][0]["logprobs"]
    if kind is CompletionForm:
        assert streamed.pop("text_offset") == [4]
        assert whole["choices"][0]["logprobs"].pop("text_offset") == [0]
    assert streamed == whole["choices"][0]["logprobs"]


def test_whole_answers_are_openais():
    chat = ChatForm(byte_level().pieces)
    parts = [Part(0, [Content("é")], STOP, None), Part(1, [], LENGTH, ENTRIES)]
    body = chat.reply(chat.head("x", 1, "m"), parts, USAGE)
    parsed = OpenAIChat.model_validate_json(body, strict=True)
    assert [choice.message.content for choice in parsed.choices] == ["é", ""]
    assert parsed.choices[0].logprobs is None
    assert parsed.choices[1].logprobs.content[0].token == "the"
    assert parsed.usage.prompt_tokens_details.cached_tokens == 3
    plain = CompletionForm(byte_level().pieces, ["the "])
    body = plain.reply(plain.head("x", 1, "m"), [Part(0, [Content("fox")], LENGTH, ENTRIES)], USAGE)
    parsed = OpenAICompletion.model_validate_json(body, strict=True)
    assert parsed.choices[0].logprobs.top_logprobs == [{"the": -0.5}]
    assert parsed.usage.total_tokens == 12
    assert plain.opening(0) == "the "


@pytest.mark.parametrize("kind", [ChatForm, CompletionForm])
def test_a_stream_ends_with_its_usage_if_it_was_asked_for_and_with_an_error_that_came_late(kind):
    form = kind(byte_level().pieces)
    head = form.head("x", 1, "m")
    plain, counted = (form.events(head, include_usage=usage) for usage in (False, True))
    assert plain.begin(USAGE) == counted.begin(USAGE) == b""
    assert (plain.end(USAGE), counted.end(USAGE)) == (DONE, usage_frame(head, USAGE) + DONE)
    error = unavailable("gone")
    assert plain.fail(error) == counted.fail(error) == error_frame(error) + DONE


TOLD = [
    Reasoning("why"),
    Reasoning(" so"),
    Content("Let me see."),
    CallBegin(0, "call_0", "f"),
    CallArguments(0, '{"a": "'),
    CallArguments(0, 'é"}'),
    CallEnd(0),
    CallBegin(1, "call_1", "g"),
    CallArguments(1, "{}"),
    CallEnd(1),
]


@pytest.mark.parametrize("cut", [[10], [1, 5, 10], range(1, 11)])
@pytest.mark.parametrize("logprobs", [True, False])
def test_a_message_streams_as_openais_client_puts_it_together(cut, logprobs):
    form = ChatForm(byte_level().pieces)
    head = form.head("x", 1, "m")
    made = form.events(head, include_usage=False).chunks(0)
    entries = form.logprobs(ENTRIES, 0) if logprobs else None
    stream = made.first()
    for start, end in itertools.pairwise([0, *cut]):
        stream += made.tell(TOLD[start:end], entries)
    chunks = chunks_of(stream + made.last(Ending("tool_calls")))
    told = [ChatCompletionChunk.model_validate(chunk, strict=True).choices[0] for chunk in chunks]
    message = gather(TOLD)
    assert "".join(each.delta.content or "" for each in told) == message.content == "Let me see."
    assert (
        "".join(each.delta.model_extra.get("reasoning_content", "") for each in told) == message.reasoning == "why so"
    )
    calls = {}
    for part in itertools.chain.from_iterable(each.delta.tool_calls or () for each in told):
        call = calls.setdefault(part.index, {"arguments": ""})
        call["arguments"] += part.function.arguments
        if part.id is not None:
            assert len(call) == 1
            call |= {"id": part.id, "name": part.function.name, "type": part.type}
    assert calls == {
        0: {"arguments": '{"a": "é"}', "id": "call_0", "name": "f", "type": "function"},
        1: {"arguments": "{}", "id": "call_1", "name": "g", "type": "function"},
    }
    shown = [each.logprobs for each in told if each.logprobs is not None]
    assert len(shown) == len(list(cut)) * logprobs
    body = json.loads(form.reply(head, [Part(0, TOLD, Ending("tool_calls"), None)], USAGE))
    whole = OpenAIChat.model_validate(body, strict=True).choices[0]
    assert whole.finish_reason == told[-1].finish_reason == "tool_calls"
    assert [call.function.arguments for call in whole.message.tool_calls] == ['{"a": "é"}', "{}"]
    assert whole.message.model_extra["reasoning_content"] == "why so"


def test_what_a_message_has_none_of_is_left_out():
    form = ChatForm(byte_level().pieces)
    head = form.head("x", 1, "m")
    told = [
        json.loads(form.reply(head, [Part(0, each, STOP, None)], USAGE)) for each in ([Content("x")], [], TOLD[3:7])
    ]
    messages = [each["choices"][0]["message"] for each in told]
    assert [message["content"] for message in messages] == ["x", "", None]
    assert not {"tool_calls", "reasoning_content"} & (set(messages[0]) | set(messages[1]))
    assert "reasoning_content" not in messages[2]


def test_the_last_chunk_has_the_usage_and_no_choice():
    [chunk] = chunks_of(usage_frame(ChatForm(byte_level().pieces).head("x", 1, "m"), USAGE))
    parsed = ChatCompletionChunk.model_validate(chunk, strict=True)
    assert (parsed.choices, parsed.usage.completion_tokens) == ([], 7)
    assert DONE == b"data: [DONE]\n\n"


def test_a_frame_holds_a_struct_or_json():
    assert frame(b"{}") == b"data: {}\n\n"
    assert chunks_of(frame(USAGE))[0]["prompt_tokens"] == Usage(**chunks_of(frame(USAGE))[0]).prompt_tokens == 5


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (invalid("m", "p"), 400, "invalid_request_error", None),
        (context_length_exceeded(60, 10, 64, "prompt"), 400, "invalid_request_error", "context_length_exceeded"),
        (unauthorised("m"), 401, "authentication_error", "invalid_api_key"),
        (too_busy("m", 3), 429, "rate_limit_error", "rate_limit_exceeded"),
        (unavailable("m"), 503, "service_unavailable_error", "unavailable"),
        (from_mesh(400, "bad", "m"), 400, "invalid_request_error", "bad"),
        (from_mesh(429, "queue_full", "m", 9), 429, "rate_limit_error", "queue_full"),
        (from_mesh(503, "", "m"), 503, "service_unavailable_error", None),
        (from_mesh(500, "x", "m"), 500, "server_error", "x"),
    ],
)
def test_error_bodies(error, status, kind, code):
    [body] = chunks_of(error_frame(error))
    assert set(body) == {"error"}
    assert (error.status, body["error"]["type"], body["error"]["code"]) == (status, kind, code)
    assert (error.retry_after_s > 0) == (status in {429, 503})
