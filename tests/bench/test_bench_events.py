"""The event stream is read the same wherever the network cuts it, and no two prompts of a load are alike."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.bench import events, prompts

STREAM = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
    b': keep-alive\n\nevent: message\ndata:{"choices":[{"delta":{"content":"h\xc3\xa9"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cuts_do_not_matter(cuts):
    places = [0, *sorted(cuts), len(STREAM)]
    lines = events.EventLines()
    payloads = [p for a, b in itertools.pairwise(places) for p in lines.feed(STREAM[a:b])]
    assert payloads[-1] == events.DONE
    first, second, last = map(events.chunk, payloads[:-1])
    assert (first.has_text, second.has_text, last.has_text) == (False, True, False)
    assert last.usage is not None
    assert last.usage.completion_tokens == 1


def test_a_line_without_an_end_is_refused():
    lines = events.EventLines()
    with pytest.raises(events.LineTooLongError):
        lines.feed(b"data: " + b"x" * (events.MAX_LINE_BYTES + 1))


def test_completion_text_counts_as_text():
    assert events.chunk(b'{"choices":[{"text":"a","finish_reason":null,"logprobs":{}}],"id":"x"}').has_text
    assert not events.chunk(b'{"choices":[{"text":"","finish_reason":"stop"}]}').has_text


@pytest.mark.parametrize("endpoint", list(prompts.Endpoint))
@pytest.mark.parametrize("kind", list(prompts.PromptKind))
def test_prompts_are_unique_from_their_first_word_and_repeatable(endpoint, kind):
    shape = prompts.Shape("m", endpoint=endpoint, prompts=kind, input_len=40)
    bodies = [prompts.body(shape, index) for index in range(50)]
    assert bodies == [prompts.body(shape, index) for index in range(50)]
    assert len(set(bodies)) == 50
    assert json.loads(bodies[0])["ignore_eos"] is True


def test_token_prompts_have_the_length_and_stay_inside_the_vocabulary():
    shape = prompts.Shape("m", input_len=500, vocab=1000)
    ids = json.loads(prompts.body(shape, 7))["prompt"]
    assert len(ids) == 500
    assert all(prompts.FIRST_ID <= token < 1000 for token in ids)
