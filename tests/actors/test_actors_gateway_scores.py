"""Log-probabilities of prompts through a real gateway, in front of a scripted mesh that sends them in pieces."""

import json

import httpx
import pytest
from gateway_fake_mesh import PATIENCE_S, FakeMesh, scored

from edgemesh.actors import gateway_scores
from edgemesh.actors.gateway_scores import ScoreRoom
from edgemesh.api.errors import ApiError
from edgemesh.api.extras import Extras
from edgemesh.api.resolve import Choice, Job
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Sampling

TEXT = "the quick brown fox jumps über 🎉"


@pytest.fixture(scope="module")
def mesh():
    with FakeMesh() as running:
        yield running


@pytest.fixture(scope="module")
def http(mesh):
    with httpx.Client(base_url=mesh.url, timeout=PATIENCE_S) as made:
        yield made


def ask(http, path="/v1/completions", **fields):
    given = {"prompt": TEXT} if "completions" in path and "chat" not in path else {}
    response = http.post(path, json={"model": "tiny", "max_tokens": 4} | given | fields)
    if not fields.get("stream") or response.status_code != 200:
        return response.status_code, response.json()
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return 200, [json.loads(each) for each in data]


def columns_of(answer, index=0):
    """The whole columns of one choice, of a whole answer or of a stream's events."""
    chunks = answer if isinstance(answer, list) else [answer]
    found = {}
    for choice in (each for chunk in chunks for each in chunk["choices"] if each["index"] == index):
        for name, column in (choice["logprobs"] or {}).items():
            found.setdefault(name, []).extend(column)
    return found


def right(mesh, text, top, name=lambda each: each):
    """The columns of an echoed prompt."""
    ids = mesh.tokenizer.encode(text).ids
    entries = [scored(ids, at, top, mesh.tokenizer.get_vocab_size()) for at in range(len(ids) - 1)]
    return ids, [None, *(pytest.approx(value) for value, _, _ in entries)], entries


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [0, 1, 4, None])
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_has_the_log_probabilities_of_its_prompt(mesh, http, stream, length, as_ids):
    ids, values, entries = right(mesh, TEXT, 2)
    prompt = ids if as_ids else TEXT
    status, answer = ask(http, prompt=prompt, echo=True, logprobs=2, max_tokens=length, stream=stream)
    assert status == 200
    columns = columns_of(answer)
    drawn = 16 if length is None else length
    drawn = min(drawn, len(ids))
    assert {len(each) for each in columns.values()} == {len(ids) + drawn}
    assert columns["token_logprobs"][: len(ids)] == values
    assert columns["token_logprobs"][len(ids) :] == [-0.5] * drawn
    assert columns["top_logprobs"][0] is None
    for at, (value, _, likely) in enumerate(entries, 1):
        assert max(columns["top_logprobs"][at].values()) == pytest.approx(max(value, likely[0][1]))
    chunks = answer if stream else [answer]
    text = "".join(each["text"] for chunk in chunks for each in chunk["choices"])
    assert text.startswith(TEXT)
    offsets = columns["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[len(ids) :][:1] == ([len(TEXT)] if drawn else [])
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    if stream:
        first = chunks[0]["choices"][0]
        assert (first["text"], len(first["logprobs"]["tokens"])) == (TEXT, len(ids))


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_one_prompt_share_what_its_first_one_asked(mesh, http, stream):
    prompts = ["the fox", "pack my box", "x"]
    fields = {"prompt": prompts, "n": 3, "echo": True, "logprobs": 1, "session": f"shared-{stream}"}
    status, answer = ask(http, stream=stream, **fields)
    assert status == 200
    asked = [each for each in mesh.submits if each.session == f"shared-{stream}"]
    assert [each.prompt_logprobs for each in sorted(asked, key=lambda each: each.sampling.choice)] == [1] * 3 + [-1] * 6
    for index in range(9):
        ids, values, _ = right(mesh, prompts[index // 3], 1)
        assert columns_of(answer, index)["token_logprobs"][: len(ids)] == values


def test_prompt_logprobs_are_told_as_vllm_does(mesh, http):
    ids, _, entries = right(mesh, TEXT, 3)
    status, answer = ask(http, prompt=[TEXT, "the fox"], n=2, prompt_logprobs=3, max_tokens=0)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 0
    tables = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert [choice["text"] for choice in answer["choices"]] == [""] * 4
    assert (tables[0], tables[2]) == (tables[1], tables[3])
    assert len(tables[0]) == len(ids)
    assert tables[0][0] is None
    for at, (value, rank, likely) in enumerate(entries, 1):
        row = tables[0][at]
        own = row.pop(str(ids[at]))
        assert (own["logprob"], own["rank"]) == (pytest.approx(value), rank)
        rest = {str(token): pytest.approx(each) for token, each in likely if token != ids[at]}
        assert {token: each["logprob"] for token, each in row.items()} == rest
        assert {each["rank"] for each in row.values()} <= {1, 2, 3}
    status, answer = ask(http, max_tokens=2)
    assert "prompt_logprobs" not in answer["choices"][0]


def test_a_chat_has_them_beside_its_choices(mesh, http):
    messages = [{"role": "user", "content": "fox"}]
    status, answer = ask(http, "/v1/chat/completions", messages=messages, prompt_logprobs=0, n=2)
    assert status == 200
    ids = mesh.tokenizer.encode("<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n").ids
    assert [None if row is None else list(row) for row in answer["prompt_logprobs"]] == [
        None,
        *([str(each)] for each in ids[1:]),
    ]
    status, answer = ask(http, "/v1/chat/completions", messages=messages)
    assert "prompt_logprobs" not in answer


def test_what_comes_twice_is_shown_once_and_what_never_comes_is_missed(mesh, http):
    ids, values, _ = right(mesh, TEXT, 1)
    status, answer = ask(http, echo=True, logprobs=1, session="twice")
    assert columns_of(answer)["token_logprobs"][: len(ids)] == values
    for fields in ({"session": "unscored"}, {"session": "unscored", "max_tokens": 0}):
        status, answer = ask(http, echo=True, logprobs=1, **fields)
        assert (status, answer["error"]["code"]) == (503, "tokens_lost")
        assert "prompt log-probabilities 0 to 2" in answer["error"]["message"]


def test_a_long_prompt_is_put_into_words_beside_the_loop(mesh, http):
    ids = mesh.tokenizer.encode("the quick brown fox " * 60).ids
    status, answer = ask(http, prompt=ids, prompt_logprobs=20, max_tokens=1)
    assert status == 200
    assert len(answer["choices"][0]["prompt_logprobs"]) == len(ids)
    assert len(ids) * 21 > 4096


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(http, fields, param):
    status, answer = ask(http, **fields)
    assert (status, answer["error"]["param"]) == (400, param)


def job(length, top, choices=1, **extras):
    asked = [Choice(each, 0, Sampling(), 1, top if not each else -1) for each in range(choices)]
    return Job(
        prompts=(TokenArray.of([1] * length),),
        choices=tuple(asked),
        stops=(),
        skip_special_tokens=True,
        stream=False,
        include_usage=False,
        session="",
        key="",
        pin=None,
        priority=0,
        extras=Extras(**extras),
    )


def test_what_a_gateway_holds_at_once_is_bounded_and_comes_free():
    room = ScoreRoom(100)
    with room.room(job(10, 4, choices=5)), room.room(job(1000, -1)):
        assert room.held == 50
        with pytest.raises(ApiError) as full, room.room(job(51, 0)):
            pass
        assert (full.value.status, full.value.retry_after_s) == (429, 1)
    assert room.held == 0
    for extras, param in (({"prompt_logprobs": 9}, "prompt_logprobs"), ({"echo_logprobs": 9}, "logprobs")):
        with pytest.raises(ApiError) as large, room.room(job(11, 9, **extras)):
            pass
        assert (large.value.status, large.value.detail.param) == (400, param)
    assert gateway_scores.MOST >= 32768 * 21
