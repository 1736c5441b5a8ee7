"""Libraries that others build on, each in a process of its own as its users run it, against a real mesh."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from e2e_clients import MODEL

pytestmark = pytest.mark.parametrize("served", ["tp1 unified"], indirect=True)

HERE = Path(__file__).parent
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def run(script, served, *arguments, **environment):
    """What a client's script prints last, as JSON."""
    command = [sys.executable, str(HERE / script), served.url, MODEL, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def expected(served):
    """The same question and text, asked without a library in between."""
    return asked(served.url)


@functools.cache
def asked(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        wanted = {"model": MODEL, "max_tokens": 16, "temperature": 0}
        chat = client.chat.completions.create(messages=QUESTION, **wanted)
        text = client.completions.create(prompt="Once upon a time", **wanted)
        scored = client.completions.create(prompt="The capital of France is Paris", echo=True, logprobs=1, **wanted)
        return {
            "chat": chat.choices[0].message.content,
            "usage": chat.usage.total_tokens,
            "text": text.choices[0].text,
            "paris": scored.choices[0].logprobs.token_logprobs[5],
        }


def test_litellm(served, traces, expected):
    found = run("client_litellm.py", served)
    assert found["whole"] == found["streamed"] == expected["chat"]
    assert found["at_once"] == [expected["chat"]] * 5
    assert found["finish"] in {"stop", "length"}
    assert found["streamed_usage"][-1:] == [found["usage"]] == [expected["usage"]]
    assert found["text"] == found["streamed_text"] == expected["text"]
    assert found["vllm"]
    assert "temperature" in found["refused"]


def test_langchain(served, traces, expected):
    found = run("client_langchain.py", served)
    assert found["whole"] == found["streamed"]
    assert found["usage"] == found["streamed_usage"]
    assert found["finish"] in {"stop", "length"}
    assert found["batch"] == found["at_once"]
    assert len(set(found["batch"])) == 4
    assert "".join(found["logprobs"]).startswith(found["plain"])
    assert found["plain"] == expected["chat"]
    assert found["text"] == found["streamed_text"] == expected["text"]
    assert [len(answers) for answers in found["choices"]] == [1, 1]
    assert found["structured"] == {"direction": "north", "rooms": 2}
    whole, streamed = found["called"]
    assert whole == streamed == [{"name": "Move", "args": found["function"]}]
    assert found["function"].keys() == {"direction", "rooms"}


def test_lm_eval(served, traces, expected):
    found = run("client_lm_eval.py", served)
    assert found["accuracy"] == 1.0
    assert found["scores"][0][0] == pytest.approx(expected["paris"], abs=1e-3)
    assert found["greedy"] == [[True, False], [False, False], [True, False]]
    assert all(right > wrong for right, wrong in (found["scores"][0], found["scores"][1][::-1], found["scores"][2]))
    assert found["written"][0] == " Paris"
