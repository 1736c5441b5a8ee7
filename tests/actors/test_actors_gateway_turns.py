"""However large a request or its answer is, the gateway's loop turns meanwhile: every other client is answered."""

import msgspec
import pytest
from gateway_inside import Inside

BEATS = 10
"""A loop that stands still gives its neighbour a turn before and after, and none in between."""

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def body(path, **given):
    said = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return msgspec.json.encode({"model": "m"} | said | given)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_log_probabilities_of_many_choices_are_put_into_words_beside_others(path, stream):
    wanted = {"logprobs": True, "top_logprobs": 20} if path == CHAT else {"logprobs": 20}
    turns, status, answer = Inside(tokens=200).turns_beside(
        path, body(path, n=128, max_tokens=200, stream=stream, **wanted)
    )
    assert status == 200
    assert answer.count(b'"logprobs":{') == 128
    assert turns > BEATS


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_long_prompt_are_shown_by_many_choices_piece_by_piece(stream):
    inside, prompt = Inside(), [1 + place % 300 for place in range(50_000)]
    asked = body(COMPLETION, prompt=prompt, n=128, max_tokens=1, echo=True, return_token_ids=True, stream=stream)
    _, status, answer = inside.turns_beside(COMPLETION, asked)
    assert status == 200
    assert answer.count(b'"prompt_token_ids":[1,2,3') == 128
    assert max(inside.pieces) < len(answer) / 2
