"""A token costs the same however many came before it, whatever the model says."""

import gc
import time

import pytest
from api_tokenizers import byte_level

from edgemesh.api.events import CallArguments, CallBegin, Content, Reasoning
from edgemesh.api.messages_events import MessageMaker
from edgemesh.api.parser import MessageParser, Parsing
from edgemesh.api.responses import ResponsesRequest
from edgemesh.api.responses_events import ResponseMaker
from edgemesh.api.responses_input import CustomInput
from edgemesh.api.responses_replies import begun
from edgemesh.api.responses_toolbox import Toolbox
from edgemesh.api.stop import StopMatcher
from edgemesh.api.stream import TextStream
from edgemesh.wire.messages import Logprob

FEW, MANY = 1000, 16_000
GROWTH = 4
"""The caches take their part; what is looked at again with each token takes sixteen times."""

CALL = '<tool_call>{"name": "f", "arguments": {"a": "'
LLAMA = '{"parameters": {"a": "'


@pytest.fixture(autouse=True)
def no_collector():
    """Its work grows with all that the tests before have left, and is nobody's token."""
    gc.disable()
    yield
    gc.enable()


def seconds(feed, first, piece, count):
    """CPU seconds for each of ``count`` pieces after the ``first``."""
    feed(first)
    start = time.thread_time()
    for _ in range(count):
        feed(piece)
    return (time.thread_time() - start) / count


def grows_no_more(make, first, piece):
    few = min(seconds(make(), first, piece, FEW) for _ in range(5))
    many = min(seconds(make(), first, piece, MANY) for _ in range(3))
    assert many < GROWTH * few


@pytest.mark.parametrize("form", ["hermes", "llama"])
@pytest.mark.parametrize(
    ("first", "piece"),
    [
        ("", "word "),
        ("", "\n"),
        ("", "<tool_cal"),
        ("", '{"name": "'),
        (CALL, "x "),
        (CALL, '\\"'),
        (LLAMA, "x "),
        (LLAMA, "{"),
        ("<tool_call>", " "),
        ("<tool_call>{", '"type": "x", '),
        ("", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("<think>", "\n"),
        ("<think>", "</thin"),
    ],
)
def test_parsers(form, first, piece):
    thinks = first == "<think>"
    parsing = Parsing(form=form, tools=frozenset({"f"}), thinks=thinks)
    grows_no_more(lambda: MessageParser(parsing, lambda: "id").feed, first, piece)


@pytest.mark.parametrize("stops", [["\n\n"], ["a" * (400 + place) + "b" for place in range(16)]])
def test_stop_strings(stops):
    grows_no_more(lambda: StopMatcher(stops).feed, "", "a")


@pytest.mark.parametrize("token", ["the", "<s>"])
def test_texts_with_log_probabilities(token):
    """Those of tokens without a text of their own are kept until more text comes."""
    text = byte_level()
    [number] = text.encode(token, add_special_tokens=False)
    entry = Logprob(number, -1.0)

    def make():
        stream = TextStream(text.pieces, ["\n\n"])
        return lambda tokens: stream.feed(tokens, [entry] * len(tokens))

    grows_no_more(make, [], [number])


@pytest.mark.parametrize("event", [Content("x "), Reasoning("x "), CallArguments(0, "x ")])
@pytest.mark.parametrize("api", ["messages", "responses"])
def test_answers_of_other_apis(api, event):
    def make():
        if api == "messages":
            return MessageMaker("msg_1", "m").say
        request = ResponsesRequest(model="m", input="x")
        made = ResponseMaker(begun(request, "resp_1", 1, "m"), lambda: 1, box=Toolbox([]), summarise=False)
        return made.say

    first = [CallBegin(0, "call_1", "f")] if isinstance(event, CallArguments) else []
    grows_no_more(make, first, [event])


@pytest.mark.parametrize("first", ['{"input": "', '{"other": "'])
@pytest.mark.parametrize("piece", ["x ", "\\ud83d"])
def test_inputs_of_custom_tools(first, piece):
    grows_no_more(lambda: CustomInput().feed, first, piece)
