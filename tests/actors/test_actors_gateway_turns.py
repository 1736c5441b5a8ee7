"""However large a request or its answer is, the gateway's loop turns meanwhile: every other client is answered."""

import itertools
import sys
from unittest.mock import Mock

import msgspec
import pytest
from gateway_inside import Inside

from edgemesh.actors import gateway
from edgemesh.actors.gateway_metrics import Metrics

BEATS = 7
"""A loop that stands still gives its neighbour a turn before and after, and none in between."""

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def body(path, **given):
    said = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return msgspec.json.encode({"model": "m"} | said | given)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_log_probabilities_of_many_choices_are_put_into_words_beside_others(path, stream):
    wanted = {"logprobs": True, "top_logprobs": 20} if path == CHAT else {"logprobs": 20}
    turns, status, answer = Inside(tokens=400).turns_beside(
        path, body(path, n=128, max_tokens=400, stream=stream, **wanted), BEATS
    )
    assert status == 200
    assert answer.count(b'"logprobs":{') == 128
    assert turns >= BEATS


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_long_prompt_are_shown_by_many_choices_piece_by_piece(stream):
    inside, prompt = Inside(), [1 + place % 300 for place in range(50_000)]
    asked = body(COMPLETION, prompt=prompt, n=128, max_tokens=1, echo=True, return_token_ids=True, stream=stream)
    _, status, answer = inside.turns_beside(COMPLETION, asked)
    assert status == 200
    assert answer.count(b'"prompt_token_ids":[1,2,3') == 128
    assert max(inside.pieces) < len(answer) / 2


MANY_IDS = b'{"model":"m","max_tokens":1,"prompt":[' + b",".join([b"[" + b"12," * 3999 + b"1]"] * 256) + b"]}"
TURN = b'{"role":"user","content":"hello there"}'
MANY_TURNS = b'{"model":"m","max_tokens":1,"messages":[' + b",".join([TURN] * 4096) + b"]}"


@pytest.mark.parametrize(
    ("path", "asked"),
    [(COMPLETION, MANY_IDS), (CHAT, MANY_TURNS), ("/v1/messages", MANY_TURNS), ("/tokenize", MANY_TURNS)],
    ids=["ids", "chat", "messages", "tokenize"],
)
def test_a_large_request_is_read_beside_others(path, asked):
    if path == "/tokenize":
        asked = asked.replace(b'"max_tokens":1,', b"")
    turns, status, _ = Inside().turns_beside(path, asked, BEATS)
    assert status == 200
    assert turns >= BEATS


def test_all_choices_of_a_request_are_submitted_in_turns(monkeypatch):
    monkeypatch.setattr("edgemesh.actors.gateway_streams.TURN_NS", -1)
    inside = Inside()
    _, status, _ = inside.turns_beside(COMPLETION, body(COMPLETION, n=128, max_tokens=1))
    assert status == 200
    assert len(inside.submits) == 128
    assert inside.answered_before_the_last == 127


@pytest.mark.parametrize("path", ["/metrics", "/load", "/openapi.json"])
def test_what_describes_the_whole_is_put_together_beside_others(path, tmp_path):
    inside = Inside(metrics=Metrics("gateway-0", tmp_path / "metrics"))
    other = Metrics("gateway-1", tmp_path / "metrics")
    for endpoint, code in itertools.product(range(20), range(400, 420)):
        other.answered(str(endpoint), code)
    other.share()
    [left] = (tmp_path / "metrics").iterdir()
    for number in range(2, 250):
        (left.parent / f"gateway-{number}.prom").write_bytes(left.read_bytes())
    turns, status, answer = inside.turns_beside(path, None, BEATS)
    assert status == 200
    assert answer
    assert turns >= BEATS


def test_the_loop_need_not_wait_long_for_the_interpreters_lock(monkeypatch):
    before = sys.getswitchinterval()
    monkeypatch.setattr(gateway, "read_mesh", Mock(side_effect=FileNotFoundError))
    monkeypatch.setattr(sys, "argv", ["gateway", "--run-dir", "/none", "--name", "gateway-0", "--epoch", "0"])
    monkeypatch.setattr(gateway, "disable_created_metrics", Mock())
    monkeypatch.setattr("resource.setrlimit", Mock())
    try:
        with pytest.raises(FileNotFoundError):
            gateway.main()
        assert sys.getswitchinterval() == pytest.approx(gateway.SWITCH_S)
    finally:
        sys.setswitchinterval(before)
