"""`edgemesh trace` on a live mesh: who was slow, where a request's time went, and what SQL says of it."""

import json
from pathlib import Path

import pytest
from e2e_clients import posting, together, trace

pytestmark = pytest.mark.parametrize("served", ["tp2-dp2 split"], indirect=True)


@pytest.fixture
def about(served, traces):
    """The gateway's own account of a request; all of its traces are written."""
    (answer,) = together(served, [posting(text="The trace of this request", max_tokens=12)])
    traces.settle()
    finished = traces.events("request.finished", actors="gateway-*")
    return next(event for event in finished if answer["id"] in event["request"])


def test_every_actor_writes_a_trace_of_its_own(served, about):
    written = {path.name.removesuffix(".jsonl") for path in served.traces.glob("*.jsonl")}
    # The reaper and the processes that work grammars out are no actors.
    assert {name for name in served.actors() if not name.startswith(("reaper", "grammar", "checker"))} <= written


def test_requests_lists_it_and_show_tells_its_way(served, about):
    listed = trace(served, "requests", "--limit", "1000", "--group", str(about["group"]), "--json")
    assert about["request"] in listed
    told = trace(served, "show", about["request"])
    assert about["request"] in told
    for word in ("prefill", "decode"):
        assert word in told
    timeline = json.loads(trace(served, "show", about["request"], "--json"))
    assert timeline


def test_ticks_and_sql_agree_on_the_steps(served, about):
    assert "decode" in trace(served, "ticks")
    count = trace(served, "sql", "select count(*) as steps from events where event = 'tick.plan' and plane = 'decode'")
    lines = [line for path in served.traces.glob("group-*.jsonl") for line in Path(path).read_text().splitlines()]
    plans = [e for e in map(json.loads, lines) if e["event"] == "tick.plan" and e["plane"] == "decode"]
    assert plans
    assert str(len(plans)) in count
