"""The edges of the HTTP side: paths that are not served, other methods, other origins, other types of body."""

import json

import httpx
import pytest
from gateway_fake_mesh import PATIENCE_S, PROMPT, FakeMesh, connect, wait_for

from edgemesh.api.absent import ABSENT
from edgemesh.api.routes import ROUTES
from edgemesh.topology import TopologyError
from edgemesh.topology.parse import parse

PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def mesh():
    with FakeMesh(allowed_origins=(PAGE, "http://localhost:3000")) as running:
        yield running


@pytest.fixture
def http(mesh):
    with httpx.Client(base_url=mesh.url, timeout=PATIENCE_S) as made:
        yield made


BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200}


@pytest.mark.parametrize("path", ABSENT)
def test_what_is_not_served_says_what_is(http, path):
    served = {route.path for route in ROUTES}
    for method, where in (("POST", path), ("GET", path + "/abc")):
        if where in served:
            continue  # only what lies below it is not
        answer = http.request(method, where, json={} if method == "POST" else None)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (404, "not_found_error")
        # Anthropic's form of an error has no code.
        assert error.get("code", "endpoint_not_served") == "endpoint_not_served"
        assert f"{method} {where} is not served" in error["message"]
        assert "POST /v1/chat/completions" in error["message"]


def test_any_other_path_says_what_is_served_too(http):
    answer = http.get("/nothing" + "x" * 4000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "POST /v1/completions" in answer.json()["error"]["message"]
    assert len(answer.content) < 1000


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/completions//"])
def test_a_slash_at_the_end_changes_nothing(http, path):
    assert http.post(path, json=BODY).json()["choices"][0]["text"] == PROMPT
    assert http.get("/health/").status_code == 200
    assert http.get("/v1/models/tiny/").json()["id"] == "tiny"
    assert http.get("/").status_code == 404


@pytest.mark.parametrize("path", ["/health", "/ping", "/load", "/version", "/v1/models", "/metrics"])
def test_head_is_get_without_the_body(http, path):
    head = http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == http.get(path).headers["content-type"]
    assert http.head("/v1/completions").status_code == 405


def test_a_client_without_a_tokenizer_learns_the_special_tokens(http, mesh):
    found = http.get("/tokenizer_info").json()
    assert found["model_max_length"] == mesh.capacity.max_model_len
    assert "<|im_start|>" in found["chat_template"]
    assert found["eos_token"] == "<|endoftext|>"
    assert found["bos_token"] is None


def test_options_name_the_methods(http):
    for path, allow in (("/v1/completions", "OPTIONS, POST"), ("/health", "GET, HEAD, OPTIONS")):
        answer = http.options(path)
        assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allow, b"")
        assert "access-control-allow-origin" not in answer.headers
    assert http.options("/v1/embeddings").status_code == 404


def preflight(http, origin=PAGE, path="/v1/chat/completions", **headers):
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"} | headers
    return http.options(path, headers=asked)


def test_a_preflight_lets_an_allowed_page_send_json_and_a_key(http):
    names = "authorization,content-type,x-stainless-os"
    answer = preflight(http, **{"Access-Control-Request-Headers": names})
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-methods"] == "OPTIONS, POST"
    assert answer.headers["access-control-allow-headers"] == names
    assert int(answer.headers["access-control-max-age"]) > 0
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers
    for hostile in ("x" * 4000, "a\x7fb", "a:b"):
        refused = preflight(http, **{"Access-Control-Request-Headers": hostile})
        assert "access-control-allow-headers" not in refused.headers


@pytest.mark.parametrize("origin", ["https://evil.example", "null", PAGE + ".evil.example", PAGE + ":8443", ""])
def test_a_preflight_of_another_page_is_refused(http, origin):
    answer = preflight(http, origin)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in answer.headers


def test_answers_and_errors_may_be_read_by_allowed_pages_alone(http):
    for path, body in (("/v1/completions", BODY), ("/v1/completions", {}), ("/v1/embeddings", {})):
        allowed = http.post(path, json=body, headers={"Origin": PAGE})
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in allowed.headers["access-control-expose-headers"]
        for headers in ({}, {"Origin": "https://evil.example"}):
            assert "access-control-allow-origin" not in http.post(path, json=body, headers=headers).headers
    with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}, headers={"Origin": PAGE}) as answer:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert list(answer.iter_lines())[-2] == "data: [DONE]"


@pytest.mark.parametrize("origins", [(), ("*",)])
def test_no_origin_or_every_origin(origins):
    with FakeMesh(allowed_origins=origins) as mesh, httpx.Client(base_url=mesh.url, timeout=PATIENCE_S) as http:
        answer = preflight(http, "https://any.example")
        assert answer.status_code == (204 if origins else 403)
        assert answer.headers.get("access-control-allow-origin") == ("*" if origins else None)
        plain = http.get("/v1/models", headers={"Origin": "https://any.example"})
        assert plain.headers.get("access-control-allow-origin") == ("*" if origins else None)


@pytest.mark.parametrize("origin", ["chat.example", "https://a/b", "https://", "https://a, https://b", "", "a b://c"])
def test_what_is_no_origin_is_no_topology(origin):
    with pytest.raises(TopologyError, match="allowed_origins"):
        parse(f"[gateway]\nallowed_origins = [{json.dumps(origin)}]")
    assert parse("[gateway]\nallowed_origins = ['*', 'app://x', 'https://[::1]:80']").gateway.allowed_origins


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "application/json"},
        {"Content-Type": "Application/JSON; charset=UTF-8"},
        {"Content-Type": 'application/json;charset="utf-8"'},
        {"Content-Type": "application/json", "Content-Encoding": "identity"},
    ],
)
def test_bodies_that_are_json(http, headers):
    assert http.post("/v1/completions", content=json.dumps(BODY), headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {"Content-Type": "x" * 5000},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_bodies_that_say_they_are_something_else(http, path, headers):
    answer = http.post(path, content=json.dumps(BODY), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert len(answer.content) < 1000


def test_ping_says_what_health_says(http):
    assert http.get("/ping").json() == http.get("/health").json() == {"status": "ok", "reason": ""}


def test_load_counts_what_is_open(mesh, http):
    idle = {"gateway": "gateway-0", "open_requests": 0, "open_streams": 0}
    wait_for(lambda: http.get("/load").json() == {"server_load": 0, "gateways": [idle]}, "nothing is open")
    with connect(mesh) as raw:
        data = json.dumps(BODY | {"session": "hold", "n": 3, "max_tokens": 9000}).encode()
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        busy = idle | {"open_requests": 1, "open_streams": 3}
        wait_for(lambda: http.get("/load").json() == {"server_load": 1, "gateways": [busy]}, "it is counted")
    wait_for(lambda: http.get("/load").json()["server_load"] == 0, "it is closed")


def test_load_sums_the_gateways_of_a_port():
    with FakeMesh(processes=2) as mesh, httpx.Client(base_url=mesh.url, timeout=PATIENCE_S) as http:

        def both():
            return [each["gateway"] for each in http.get("/load").json()["gateways"]] == ["gateway-0", "gateway-1"]

        wait_for(both, "each gateway knows of the other")
