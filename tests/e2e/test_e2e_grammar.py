"""The mesh's side of outputs that must have a form: any group, any shape, and whatever happens to who works the masks out."""

import contextlib
import json
import os
import re
import signal

import jsonschema
import psutil
import pytest
from e2e_clients import CHAT, posting, raw, text_of, together, wait_for
from e2e_reference import PATTERN

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
        "name": {"type": "string", "maxLength": 6},
    },
    "required": ["id", "tags", "name"],
    "additionalProperties": False,
}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}}
FULL = pytest.param("tp4-dp2 unified", marks=pytest.mark.full)
IDLE = pytest.mark.parametrize("served", ["null-dp4 split", "tp2-dp2 split", FULL], indirect=True)
QUICK = pytest.mark.parametrize("served", ["null-dp4 split"], indirect=True)


def fits(answer, index=0):
    """The answer is whole and as the schema has it."""
    jsonschema.validate(json.loads(text_of(answer, index)), SCHEMA)
    return answer["choices"][index]["finish_reason"] == "stop"


def workers(served):
    """The process that works grammars out, of each group that has started one."""
    found = {}
    for name, pid in served.actors().items():
        if name.startswith("group-"):
            for child in psutil.Process(pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "edgemesh.grammar.worker" in child.cmdline():
                        found[name] = child
    return found


@IDLE
def test_one_constrained_request_runs_while_all_other_groups_idle(served, traces):
    groups = sum(name.startswith("group-") for name in served.actors())
    for group in range(groups):
        (answer,) = together(served, [posting(CHAT, group=group, max_tokens=200, **FORM)])
        assert fits(answer)
    traces.settle()
    costs = list(traces.events("request.masked", actors="group-*"))
    assert len(costs) == groups
    assert all(cost["masks"] > 5 and 0 < cost["mask_ns"] <= cost["waited_ns"] for cost in costs)


@QUICK
def test_many_constrained_choices_beside_ordinary_ones(served, traces):
    calls = [posting(text=f"{number} is", max_tokens=60) for number in range(4)]
    calls += [posting(CHAT, text=f"number {number}", n=4, max_tokens=300, **FORM) for number in range(8)]
    found = together(served, calls)
    assert all(answer["usage"]["completion_tokens"] == 60 for answer in found[:4])
    assert all(fits(answer, index) for answer in found[4:] for index in range(4))


@QUICK
def test_a_worker_that_is_killed_costs_one_request_at_most(served, traces):
    def kill():
        running = workers(served)
        for worker in running.values():
            os.kill(worker.pid, signal.SIGKILL)
        return running

    together(served, [posting(CHAT, group=group, max_tokens=200, **FORM) for group in range(4)])
    assert set(kill()) == {f"group-{group}" for group in range(4)}
    after = together(served, [posting(CHAT, group=group % 4, max_tokens=200, **FORM) for group in range(12)])
    assert all(map(fits, after))
    assert set(workers(served)) == {f"group-{group}" for group in range(4)}


@QUICK
def test_a_group_does_not_grow_by_what_grammars_take(served, traces):
    together(served, [posting(CHAT, group=group, max_tokens=200, n=8, **FORM) for group in range(4)])
    for name, pid in served.actors().items():
        if name.startswith("group-"):
            assert psutil.Process(pid).memory_info().rss < 80e6, name


@QUICK
def test_a_client_that_leaves_a_constrained_request_costs_nothing(served, traces):
    with raw(served, CHAT, stream=True, max_tokens=3000, guided_regex="([a-z] ?){2900}") as client:
        assert client.recv(200)
    wait_for(lambda: list(traces.events("request.aborted", actors="group-*")), "the request was not aborted")
    (cost,) = traces.events("request.masked", actors="group-*")
    assert re.fullmatch(r"cmpl-.*|chatcmpl-.*", cost["request"])


@pytest.mark.parametrize("served", ["tp2-dp2 split"], indirect=True)
def test_greedy_within_a_form_is_what_transformers_says_under_the_same_masks(served, constrained):
    # A near tie would make this a test of rounding.
    assert constrained.margin > 1e-3
    asked = {"prompt": constrained.ids, "max_tokens": 64, "temperature": 0, "guided_regex": PATTERN}
    for stream in (False, True):
        (answer,) = together(served, [posting(**asked, stream=stream)])
        assert text_of(answer) == constrained.said
