"""`edgemesh trace` on a live mesh: who was slow, where a request's time went, and what SQL says of it."""

import json
import subprocess
from pathlib import Path

import openai
import pytest

from edgemesh.bench.launch import COMMAND

pytestmark = pytest.mark.parametrize("served", ["tp2-dp2 split"], indirect=True)


def trace(served, *words):
    command = [*COMMAND, "trace", *words, "--dir", str(served.traces)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def request_id(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        wanted = {"model": "smollm2-135m", "prompt": "The trace of this request", "max_tokens": 12, "temperature": 0}
        return client.completions.create(**wanted, extra_body={"ignore_eos": True}).id


def finished(served, request_id):
    """The gateway's own account of a request, once its trace is written."""
    import time

    due = time.monotonic() + 5
    while time.monotonic() < due:
        for path in served.traces.glob("gateway-*.jsonl"):
            for event in map(json.loads, path.read_text().splitlines()):
                if event["event"] == "request.finished" and request_id in event["request"]:
                    return event
        time.sleep(0.05)
    raise AssertionError(served.tell(f"{request_id} did not finish in the trace"))


def test_every_actor_writes_a_trace_of_its_own(served, request_id):
    finished(served, request_id)
    written = {path.name.removesuffix(".jsonl") for path in served.traces.glob("*.jsonl")}
    # The reaper and the processes that work grammars out are no actors.
    assert {name for name in served.actors() if not name.startswith(("reaper", "grammar", "checker"))} <= written


def test_requests_lists_it_and_show_tells_its_way(served, request_id):
    about = finished(served, request_id)
    listed = trace(served, "requests", "--limit", "1000", "--json")
    assert about["request"] in listed
    told = trace(served, "show", about["request"])
    assert about["request"] in told
    for word in ("prefill", "decode"):
        assert word in told
    timeline = json.loads(trace(served, "show", about["request"], "--json"))
    assert timeline


def test_ticks_and_sql_agree_on_the_steps(served, request_id):
    finished(served, request_id)
    assert "decode" in trace(served, "ticks")
    count = trace(served, "sql", "select count(*) as steps from events where event = 'tick.plan' and plane = 'decode'")
    lines = [line for path in served.traces.glob("group-*.jsonl") for line in Path(path).read_text().splitlines()]
    plans = [e for e in map(json.loads, lines) if e["event"] == "tick.plan" and e["plane"] == "decode"]
    assert plans
    assert str(len(plans)) in count
