"""A gateway from its start to its end, and its limits: each test with a process of its own, in front of a scripted mesh."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import msgspec
import openai
import pytest
from gateway_fake_mesh import (
    PATIENCE_S,
    PROMPT,
    FakeMesh,
    completion,
    connect,
    get,
    port_for_several,
    post,
    send,
    wait_for,
)
from openai import OpenAI

from edgemesh.runtime.progress import LOOP_BOUND_NS
from edgemesh.wire.ids import Phase
from edgemesh.wire.messages import Capacity, Drain, Health, Stop


def test_keys_are_asked_for_where_there_are_some(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret-1\n\nsecret-2\n")
    keys.chmod(0o600)
    with FakeMesh(api_keys_file=str(keys), env={"EDGEMESH_API_KEYS": "secret-3"}) as mesh:
        for key in ("secret-1", "secret-2", "secret-3"):
            with OpenAI(base_url=mesh.url + "/v1", api_key=key, max_retries=0) as client:
                assert completion(client).choices[0].text == PROMPT
                assert client.models.list().data
        assert len({submit.key for submit in mesh.submits}) == 3
        assert all(submit.tenant == submit.key for submit in mesh.submits)
        assert not any("secret" in submit.key for submit in mesh.submits)
        told = get(mesh.url + "/v1/models", headers={"x-api-key": "secret-2"})
        assert told.status_code == 200
        for headers in (
            {},
            {"x-api-key": "wrong"},
            {"x-api-key": "secret-1", "Authorization": "Bearer wrong"},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret-1"},
            {"Authorization": "Bearer"},
        ):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")):
                given = {"headers": headers, "timeout": PATIENCE_S} | ({"json": {}} if method == "POST" else {})
                answer = httpx.request(method, mesh.url + path, **given)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert get(mesh.url + "/health").status_code == 200
        described = get(mesh.url + "/openapi.json").json()["paths"]
        assert described["/v1/completions"]["post"]["security"] == [{"bearer": []}, {"key": []}]
        assert described["/health"]["get"]["security"] == []


def test_health_gates_drain_finishes_and_stop_ends():
    with FakeMesh() as mesh, OpenAI(base_url=mesh.url + "/v1", api_key="x", max_retries=0) as client:
        mesh.tell(Health(0, serving=False, reason="rank-1.decode is stopped"))
        refused = wait_for(lambda: (a := get(mesh.url + "/health")).status_code == 503 and a, "health says no")
        assert refused.json() == {"status": "unavailable", "reason": "rank-1.decode is stopped"}
        with pytest.raises(openai.InternalServerError, match=r"rank-1\.decode is stopped"):
            completion(client)
        mesh.tell(Health(0, serving=True))
        wait_for(lambda: get(mesh.url + "/health").status_code == 200, "health says yes")
        stream = completion(client, stream=True, max_tokens=5, extra_body={"session": "hold"})
        (held,) = wait_for(lambda: list(mesh.live.values()), "it runs")
        mesh.tell(Health(0, serving=False, draining=True, reason="draining"))
        mesh.tell(Drain(10_000_000_000))
        wait_for(lambda: get(mesh.url + "/health").status_code == 503, "new requests are refused")
        with pytest.raises(openai.InternalServerError):
            completion(client)
        assert not mesh.drained.wait(0.5)
        held.submit = msgspec.structs.replace(held.submit, session="")  # its script goes on
        assert list(stream)[-1].choices[0].finish_reason == "length"
        wait_for(mesh.drained.is_set, "the supervisor is told")


def test_when_the_mesh_fails_running_requests_are_told_why():
    with FakeMesh() as mesh, OpenAI(base_url=mesh.url + "/v1", api_key="x", max_retries=0) as client:
        stream = completion(client, stream=True, max_tokens=4000, extra_body={"session": "hold"})
        answers = []

        def ask():
            try:
                completion(client, extra_body={"session": "hold"})
            except openai.APIStatusError as error:
                answers.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_for(lambda: len(mesh.submits) == 2, "both run")
        mesh.tell(Health(0, serving=False, reason="rank-0.decode died"))
        thread.join(PATIENCE_S)
        assert (answers[0].status_code, "rank-0.decode died" in answers[0].message) == (503, True)
        with pytest.raises(openai.APIError, match=r"rank-0\.decode died"):
            list(stream)


def test_stop_ends_the_process_with_open_requests():
    with FakeMesh() as mesh:
        with connect(mesh) as raw:
            send(raw, {"stream": True, "session": "hold"})
            wait_for(lambda: mesh.submits, "it runs")
            mesh.tell(Stop("told to"))
            assert mesh.wait_exit() == [0]
        with pytest.raises(httpx.ConnectError):
            get(mesh.url + "/health")


STUCK = """
import os, time
from edgemesh.actors import gateway
from edgemesh.actors.gateway_streams import Streams

def look(streams):
    while os.path.exists(os.environ["BEGIN"]) and not os.path.exists(os.environ["END"]):
        time.sleep(0.01)

Streams.retry = look
gateway.main()
"""


def test_a_loop_that_no_longer_turns_is_marked_with_a_bound(tmp_path):
    def busy():
        return [mark for mark in mesh.marks if mark.phase is Phase.BUSY]

    begin, end = tmp_path / "begin", tmp_path / "end"
    with FakeMesh(program=("-c", STUCK), env={"BEGIN": str(begin), "END": str(end)}, serve=False) as mesh:
        wait_for(lambda: mesh.marks and not busy(), "it reports that it turns")
        begin.touch()
        (mark,) = wait_for(busy, "it is marked")
        assert mark.bound_ns == LOOP_BOUND_NS
        end.touch()
        wait_for(lambda: not busy(), "it turns again")


def test_before_the_mesh_serves_it_answers_503():
    capacity = Capacity(257, 16, 4096, 400, (0,), None, 0, 0)
    mesh = FakeMesh(capacity=capacity, serve=False)
    with mesh:
        answer = get(mesh.url + "/health")
        assert (answer.status_code, answer.json()["reason"]) == (503, "the mesh is starting")
        answer = post(mesh.url + "/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert answer.status_code == 503
        assert answer.json()["error"]["message"].endswith("the mesh is starting")
        assert answer.headers["retry-after"]


def test_limits_count_choices_and_requests():
    with FakeMesh(max_streams=4) as mesh, contextlib.ExitStack() as stack:
        raws = [stack.enter_context(connect(mesh)) for _ in range(2)]
        for raw in raws:
            send(raw, {"n": 2, "session": "hold", "stream": True})
        wait_for(lambda: len(mesh.submits) == 4, "four choices run")
        answer = post(mesh.url + "/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        raws[0].close()
        wait_for(lambda: len(mesh.cancels) == 2, "two are over")

        def taken():
            answer = post(mesh.url + "/v1/completions", json={"model": "tiny", "prompt": "fox"})
            return answer.status_code == 200 and answer.json()["choices"][0]["text"] == "fox"

        wait_for(taken, "there is room again")


def test_several_processes_share_the_port_and_tell_themselves_apart():
    with port_for_several() as port, FakeMesh(port=port, processes=2) as mesh:

        def ask():
            answer = post(mesh.url + "/v1/completions", json={"model": "tiny", "prompt": "fox"})
            assert answer.json()["choices"][0]["text"] == "fox"
            return {submit.gateway for submit in mesh.submits} == {0, 1}

        wait_for(ask, "both answer")

        def counted():
            lines = get(mesh.url + "/metrics").text.splitlines()
            counts = [line for line in lines if line.startswith('edgemesh_requests_total{endpoint="completions"')]
            return len(counts) == 2 and sum(float(line.split()[-1]) for line in counts) == len(mesh.submits)

        wait_for(counted, "whichever is asked counts for both")


def test_a_taken_port_is_a_clear_fault():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        mesh = FakeMesh(port=taken.getsockname()[1], spawn=False)
        with mesh:
            process = mesh.spawn(0)
            assert process.wait(PATIENCE_S) == 70
            assert "Address already in use" in mesh.log()
            assert "in use" in wait_for(lambda: mesh.faults, "the supervisor is told")[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "tokenizer.json"),
        (b"{", "not readable"),
        (b'{"decoder": {"type": "WordPiece"}}', "not readable"),
    ],
)
def test_a_model_whose_text_cannot_be_read_is_a_clear_fault(content, reason):
    with FakeMesh(spawn=False) as mesh:
        path = mesh.run_dir / "model" / "tokenizer.json"
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        assert mesh.spawn(0).wait(PATIENCE_S) == 70
        assert re.search(reason, wait_for(lambda: mesh.faults, "the supervisor is told")[0])


def test_the_gateway_is_small_and_knows_no_torch():
    with FakeMesh() as mesh:
        assert post(mesh.url + "/v1/completions", json={"model": "tiny", "prompt": "fox"}).status_code == 200
        process = Path("/proc") / str(mesh.pid())
        status, maps = (process / "status").read_text(), (process / "maps").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)
    assert "libtorch" not in maps
    assert resident < 150_000
    code = "import sys, edgemesh.actors.gateway; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
