"""Constraints at the real gateway: what reaches the mesh, what is refused before it, and that no neighbour notices."""

import asyncio
import time

import httpx
import pytest
from gateway_fake_mesh import PATIENCE_S, PROMPT, FakeMesh

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
BLOCKED_S = 1.0
"""What a trial may take on the processor: a loop that worked out a grammar itself would stand still for this long."""


def hostile(turn):
    """(What is refused on any machine, what a quick one may take); other ones in each turn, for verdicts are remembered."""
    large = {"enum": list(range(turn, 60_000 + turn))}
    ring = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(2000)} | {"2000": {"$ref": "#"}}
    refused = [
        {"guided_json": {"type": "integer", "multipleOf": 1000003 + 2 * turn}},
        {"guided_json": {"type": "object", "properties": {f"p{turn}/{n}": {"type": "string"} for n in range(4000)}}},
        {"guided_regex": "(a{1000}){1000}" + "b" * turn},
        {"guided_grammar": "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(4000 + turn))},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": large}}},
        {"guided_grammar": "root ::= " + "(" * (60_000 + turn)},
    ]
    return refused, [{"guided_json": {"const": "x" * (250_000 + turn)}}, {"guided_json": {"$defs": ring}}]


@pytest.fixture(scope="module")
def mesh():
    with FakeMesh(max_body_bytes=1 << 20) as running:
        yield running


@pytest.fixture
def http(mesh):
    with httpx.Client(base_url=mesh.url, timeout=PATIENCE_S) as made:
        yield made


def completion(**given):
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 8} | given


def chat(**given):
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8} | given


PATHS = {"/v1/completions": completion, "/v1/chat/completions": chat}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_is_submitted_with_the_grammar(mesh, http, path, stream):
    session = f"{path} {stream}"
    answer = http.post(path, json=PATHS[path](session=session, n=3, stream=stream, response_format=FORMAT))
    assert answer.status_code == 200, answer.text
    found = [submit.grammar for submit in mesh.submits if submit.session == session]
    assert len(found) == 3
    assert len(set(found)) == 1
    assert '"required":["a"]' in found[0]
    http.post(path, json=PATHS[path](session=session + " free", response_format={"type": "text"}))
    assert [submit.grammar for submit in mesh.submits if submit.session == session + " free"] == [""]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"guided_json": {"not": {}}}, "guided_json", "invalid_schema"),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}}, "guided_json", "invalid_schema"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "invalid_grammar"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "conflicting_constraints"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "invalid_grammar"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
            "response_format.json_schema.schema",
            "invalid_schema",
        ),
    ],
)
def test_a_bad_constraint_is_refused_before_anything_is_submitted(mesh, http, path, stream, given, param, code):
    before = len(mesh.submits)
    answer = http.post(path, json=PATHS[path](stream=stream, **given))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert f"`{param}`" in error["message"]
    assert len(mesh.submits) == before


def pause_beside_hostile_constraints(mesh, turn):
    """The longest that a stream paused, or health took, while clients send what must not be compiled."""

    async def stream(client, until):
        gaps, last = [], time.monotonic()
        body = completion(stream=True, session="endless", max_tokens=16000)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                now = time.monotonic()
                gaps.append(now - last)
                last = now
                if until.is_set():
                    break
        return gaps

    async def run():
        until = asyncio.Event()
        async with httpx.AsyncClient(base_url=mesh.url, timeout=PATIENCE_S) as client:
            streaming = asyncio.create_task(stream(client, until))
            refused, others = hostile(turn)
            calls = [client.post("/v1/completions", json=completion(**given)) for given in refused + others]
            answering = asyncio.gather(*calls)
            healthy = []
            while not answering.done():
                start = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                healthy.append(time.monotonic() - start)
                await asyncio.sleep(0.02)
            until.set()
            return [answer.status_code for answer in await answering], await streaming, healthy

    statuses, gaps, healthy = asyncio.run(run())
    assert statuses[:6] == [400] * 6
    assert set(statuses[6:]) <= {200, 400}
    assert len(gaps) > 50
    return max(*gaps, *healthy)


def test_a_stream_beside_hostile_constraints_goes_on(mesh):
    # A machine that does much else may pause anyone, but not every time; a loop that works them out itself does so always.
    pauses = []
    while not pauses or min(pauses) >= BLOCKED_S:
        assert len(pauses) < 6, pauses
        pauses.append(pause_beside_hostile_constraints(mesh, len(pauses)))


def test_the_gateway_stays_small(mesh):
    import psutil

    process = psutil.Process(mesh.pid())
    assert process.memory_info().rss < 150 << 20
    assert not any("llguidance" in found.path for found in process.memory_maps())
