"""What a request may take of a gateway, in time and in bytes: in front of a scripted mesh, with small bounds."""

import contextlib
import json
import select
import socket
import threading
import time
from pathlib import Path

import httpx
import msgspec
import openai
import pytest
from gateway_fake_mesh import PATIENCE_S, FakeMesh, completion, connect, get, post, send, wait_for
from openai import OpenAI

from edgemesh.wire.messages import Drain

MOST = 1 << 20
REQUEST_S, BODY_S, IDLE_S = 1.5, 1.0, 0.5
"""The bounds under test; whatever is not that is left all the time of a busy machine."""

LATE_S = 30.0
"""Until then a bound has kept its word: whoever waits behind a busy machine's other work waits no longer than this."""


@pytest.fixture(scope="module")
def mesh():
    with FakeMesh(max_body_bytes=MOST) as running:
        yield running


@pytest.fixture(scope="module")
def hasty():
    """It gives requests little time."""
    with FakeMesh(request_timeout_s=REQUEST_S) as running:
        yield running


@pytest.fixture(scope="module")
def curt():
    """It waits for clients only shortly."""
    with FakeMesh(body_timeout_s=BODY_S, head_timeout_s=BODY_S, keep_alive_s=IDLE_S) as running:
        yield running


@pytest.fixture
def http(mesh):
    with httpx.Client(base_url=mesh.url, timeout=PATIENCE_S) as client:
        yield client


def said_to(mesh, *pieces):
    """All that the gateway says until it ends the connection."""
    with connect(mesh) as raw:
        for piece in pieces:
            with contextlib.suppress(ConnectionError):
                raw.sendall(piece)
        return read_all(raw)


def read_all(raw):
    said = b""
    while more := raw.recv(1 << 16):
        said += more
    return said


def read_until(raw, end):
    said = b""
    while not said.endswith(end):
        more = raw.recv(1 << 16)
        assert more, said
        said += more
    return said


def head(length, *more):
    stated = b"Content-Length: %d\r\n" % length if length is not None else b"Transfer-Encoding: chunked\r\n"
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + stated + b"".join(more) + b"\r\n"


# --- time ---


@pytest.mark.parametrize("session", ["hold", "lost"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_a_clear_error_and_its_choices_are_cancelled(hasty, session, stream):
    mesh = hasty
    placed, cancelled = len(mesh.submits), len(mesh.cancels)
    start = time.monotonic()
    body = {"model": "tiny", "prompt": "fox", "session": session, "n": 2, "stream": stream}
    answer = post(mesh.url + "/v1/completions", json=body)
    assert REQUEST_S - 0.1 < time.monotonic() - start < LATE_S
    if stream and session == "hold":  # the stream has begun, so its status is out
        assert answer.status_code == 200
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
    else:
        assert answer.status_code == 504
        error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("request_timeout", "timeout_error")
    assert f"{REQUEST_S} s" in error["message"]
    submits = mesh.submits[placed:]
    if session == "lost":
        for submit in submits:
            mesh.accept(submit, 1)
    wait_for(lambda: len(mesh.cancels) >= cancelled + 2, "both choices are cancelled")
    assert {cancel.request for cancel in mesh.cancels[cancelled:]} == {submit.request for submit in submits}
    names = {submit.request for submit in submits}
    [failed] = wait_for(lambda: [e for e in mesh.trace("request.failed") if e["request"] in names], "it is traced")
    assert (failed["status"], failed["code"]) == (504, "request_timeout")


def test_a_timeout_ends_no_other_request(hasty):
    with OpenAI(base_url=hasty.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        ended = []

        def late():
            with pytest.raises(openai.InternalServerError) as caught:
                completion(client, extra_body={"session": "hold"})
            ended.append(caught.value.status_code)

        threads = [threading.Thread(target=late) for _ in range(4)]
        for thread in threads:
            thread.start()
        count = 0
        while any(thread.is_alive() for thread in threads):
            start = time.monotonic()
            try:
                assert completion(client, prompt="fox").choices[0].text == "fox"
                count += 1
            except openai.InternalServerError:
                assert time.monotonic() - start > REQUEST_S - 0.1, "ended before its own time was up"
        assert (ended, count > 0) == ([504] * 4, True)


def test_a_slow_body_is_a_408_and_a_slow_head_too(curt):
    for pieces in ((head(100), b"{"), (head(None), b"1\r\n{\r\n"), (b"POST /v1/comp",)):
        start = time.monotonic()
        said = said_to(curt, *pieces)
        assert said.startswith(b"HTTP/1.1 408 "), said
        assert b"connection: close" in said
        assert b"_timeout" in said
        assert time.monotonic() - start < LATE_S


@pytest.mark.parametrize("length", [None, 10_000])
def test_a_drip_of_bytes_ends_in_time(curt, length):
    with connect(curt) as raw:
        raw.sendall(head(length))
        for _ in range(int(LATE_S / 0.05)):
            if select.select([raw], [], [], 0.05)[0]:
                break
            raw.sendall(b"1\r\n{\r\n" if length is None else b"{")
        else:
            pytest.fail("whoever sends a byte now and then holds a connection for ever")
        assert read_all(raw).startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_is_closed(curt):
    start = time.monotonic()
    said = said_to(curt, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200 ")
    assert IDLE_S - 0.1 < time.monotonic() - start < LATE_S


# --- bytes ---


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_that_is_too_large_is_a_413_long_before_its_end(mesh, chunked):
    size, part = 64 << 20, b"x" * 65536
    sent = 0
    with connect(mesh) as raw:
        raw.sendall(head(None if chunked else size))
        with contextlib.suppress(ConnectionError, TimeoutError):
            raw.settimeout(1)
            while sent < size:
                raw.sendall(b"10000\r\n" + part + b"\r\n" if chunked else part)
                sent += len(part)
                raw.setblocking(False)  # noqa: FBT003 - positional only
                with contextlib.suppress(BlockingIOError):
                    if raw.recv(1, socket.MSG_PEEK):
                        break
                raw.settimeout(1)
        raw.settimeout(PATIENCE_S)
        said = read_until(raw, b"}}")
    assert said.startswith(b"HTTP/1.1 413 "), said[:200]
    assert b'"code":"body_too_large"' in said
    assert sent < size // 2, "the answer came while the body was on its way"


def test_clients_that_send_too_much_read_why(mesh):
    # A real client sends its whole body before it reads: the connection must not be reset under it.
    with OpenAI(base_url=mesh.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        for size in (MOST, 4 * MOST):
            with pytest.raises(openai.APIStatusError) as caught:
                completion(client, prompt="x" * size)
            assert caught.value.status_code == 413
        assert completion(client, prompt="fox").choices[0].text == "fox"


def test_a_client_that_waits_for_100_learns_of_a_refusal_instead(mesh):
    said = said_to(mesh, head(64 << 20, b"Expect: 100-continue\r\n"))
    assert said.startswith(b"HTTP/1.1 413 "), said
    body = b'{"model": "tiny", "prompt": "fox"}'
    with connect(mesh) as raw:
        raw.sendall(head(len(body), b"Expect: 100-continue\r\n"))
        assert raw.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(body)
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


DEEP = 100_000
BOMBS = {
    "deep lists": b'{"model":"tiny","prompt":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"model":"tiny","prompt":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "deep where anything may stand": b'{"model":"tiny","prompt":"x","metadata":'
    + b'{"a":' * DEEP
    + b"1"
    + b"}" * DEEP
    + b"}",
    "not closed": b"[" * DEEP,
    "a huge integer": b'{"model":"tiny","prompt":"x","seed":' + b"9" * 100_000 + b"}",
    "a huge exponent": b'{"model":"tiny","prompt":"x","temperature":1e999999999}',
    "a long fraction": b'{"model":"tiny","prompt":"x","temperature":5.' + b"3" * 100_000 + b"}",
    "NaN": b'{"model":"tiny","prompt":"x","temperature":NaN}',
    "Infinity": b'{"model":"tiny","prompt":"x","temperature":-Infinity}',
    "a lone surrogate": b'{"model":"tiny","prompt":"\\ud800"}',
    "not UTF-8": b'{"model":"tiny","prompt":"\xc3\x28"}',
    "not UTF-8 in a name": b'{"model":"tiny","prompt":"x","\xff":1}',
    "UTF-16": '{"model":"tiny","prompt":"x"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"model":"tiny","prompt":"x"}',
    "two values": b'{"model":"tiny","prompt":"x"}{"a":1}',
    "a control character": b'{"model":"tiny","prompt":"a\x00b"}',
    "a long name": b'{"model":"tiny","prompt":"x","' + b"n" * 500_000 + b'":1}',
    "nothing": b"",
    "blanks": b" " * 1000,
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_bodies_made_to_break_a_parser_are_400s_and_quick(http, path):
    for what, body in BOMBS.items():
        start = time.monotonic()
        answer = http.post(path, content=body)
        assert answer.status_code == 400, (what, answer.text[:200])
        assert len(answer.content) < 2000, what
        assert answer.json()["error"]["message"], what
        assert time.monotonic() - start < LATE_S, what


def test_of_a_name_that_stands_twice_the_last_value_counts(http):
    body = b'{"model":"other","prompt":"dog","model":"tiny","prompt":"fox","max_tokens":9}'
    assert http.post("/v1/completions", content=body).json()["choices"][0]["text"] == "fox"


# --- clients that do not read ---


def resident_mb(mesh):
    return int(Path(f"/proc/{mesh.pid()}/statm").read_text().split()[1]) * 4096 / 1e6


def test_many_clients_that_do_not_read_are_bounded_in_memory_and_cut_off():
    count = 60
    with FakeMesh(group={"credit_deadline_s": 5.0}) as mesh, contextlib.ExitStack() as stack:
        with OpenAI(base_url=mesh.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            assert completion(client, prompt="fox").choices[0].text == "fox"
            before, took = resident_mb(mesh), []
            slow = [stack.enter_context(connect(mesh, receive_buffer=4096)) for _ in range(count)]
            for raw in slow:
                send(raw, {"session": "flood", "stream": True, "max_tokens": 16000, "logprobs": 5})
            most = before
            while len(mesh.cancels) < count:
                start = time.monotonic()
                assert completion(client, prompt="fox").choices[0].text == "fox"
                took.append(time.monotonic() - start)
                most = max(most, resident_mb(mesh))
                assert sum(took) < PATIENCE_S, "they are not cut off"
        out = [mesh.most_out[submit.request] for submit in mesh.submits if submit.session == "flood"]
        assert max(out) < 8000, "tokens beyond what the credit of a client that does not read allows"
        assert most - before < 25 + count / 2, f"{most - before:.0f} MB for {count} clients that do not read"
        assert sorted(took)[len(took) * 9 // 10] < 5, took
        wait_for(lambda: 'why="slow_reader"' in get(mesh.url + "/metrics").text, "it is counted")


# --- the end ---


@pytest.mark.parametrize("stream", [True, False])
def test_a_drain_refuses_what_is_new_closes_what_is_idle_and_finishes_what_runs(stream):
    with FakeMesh() as mesh, contextlib.ExitStack() as stack:
        idle, running, fresh = (stack.enter_context(connect(mesh)) for _ in range(3))
        idle.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_until(idle, b"}").startswith(b"HTTP/1.1 200 ")
        send(running, {"session": "hold", "stream": stream, "max_tokens": 5})
        wait_for(lambda: len(mesh.live) == 1, "it runs")
        mesh.tell(Drain(0))
        assert idle.recv(4096) == b""
        send(fresh, {})
        said = read_all(fresh)
        assert said.startswith(b"HTTP/1.1 503 ")
        for line in (b"\r\nretry-after: ", b"\r\nconnection: close\r\n"):
            assert line in said
        health = get(mesh.url + "/health")
        assert (health.status_code, health.headers["connection"]) == (503, "close")
        assert not mesh.drained.is_set()
        (held,) = mesh.live.values()
        held.submit = msgspec.structs.replace(held.submit, session="")  # its script goes on
        said = read_all(running)
        assert said.startswith(b"HTTP/1.1 200 ")
        assert (b"[DONE]" in said) == stream
        assert b'"finish_reason":"length"' in said
        wait_for(mesh.drained.is_set, "the supervisor is told")
