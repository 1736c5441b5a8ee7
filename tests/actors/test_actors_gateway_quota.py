"""API keys of a gateway and their limits: read, watched, refused; first alone, then in front of a scripted mesh."""

import asyncio
import contextlib
import os
import re
from types import SimpleNamespace

import pytest
from gateway_fake_mesh import PATIENCE_S, FakeMesh, completion, connect, get, port_for_several, post, wait_for
from openai import OpenAI, RateLimitError

from edgemesh.actors import gateway_keys
from edgemesh.actors.gateway_keys import ApiKeys, KeyFile, KeyWatch
from edgemesh.actors.gateway_quota import Quotas
from edgemesh.api.errors import ApiError
from edgemesh.api.keys import ApiKey, KeyFileError, KeyLimits, digest_of, hashed_line
from edgemesh.api.quota import MINUTE_NS
from edgemesh.runtime.ledger import Ledger
from edgemesh.runtime.trace import ListTrace


def private(path, text):
    """Write a file whole: whoever looks at it at any moment sees what it was before, or this."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    fresh.chmod(0o600)
    fresh.replace(path)
    return str(path)


# --- keys ---


def test_without_keys_everyone_passes_and_keys_that_are_none_are_an_error(tmp_path):
    assert ApiKeys().check(b"").id == ""
    assert KeyFile("", " ", KeyLimits()).read() == []
    with pytest.raises(ValueError, match="EDGEMESH_API_KEYS is set and holds no API key"):
        KeyFile("", " , ", KeyLimits())
    with pytest.raises(OSError, match="missing"):
        KeyFile(str(tmp_path / "missing"), "", KeyLimits()).read()
    path = private(tmp_path / "keys", "  # whose it is\n\tone \ntwo name=b\n")
    both = KeyFile(path, f"{hashed_line('three')},two", KeyLimits()).read()
    keys = ApiKeys(both)
    assert [len(keys), keys.check(b"Bearer two").name] == [3, "b"]
    assert len({keys.check(b"bearer  " + key).id for key in (b"one", b"two", b"three")}) == 3
    for wrong in (
        b"Bearer # whose it is",
        b"Bearer on",
        b"Bearer",
        b"",
        b"one",
        b"Bearer two name=b",
        b"Bearer " + both[0].digest,
    ):
        with pytest.raises(ApiError) as caught:
            keys.check(wrong)
        assert caught.value.status == 401


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("plain\n", 0o644, "open to others"),
        ("plain\n", 0o640, "open to others"),
        (hashed_line("k"), 0o644, None),
        (hashed_line("k"), 0o664, "can be written by others"),
        (hashed_line("k"), 0o606, "can be written by others"),
    ],
)
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path, text, mode, said):
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    file = KeyFile(str(path), "", KeyLimits())
    if said is None:
        assert file.read()
        return
    with pytest.raises(KeyFileError, match=said) as caught:
        file.read()
    assert f"chmod 600 {path}" in str(caught.value)


def test_bytes_that_are_no_text_and_files_without_end_are_refused(tmp_path):
    path = tmp_path / "keys"
    for data, said in ((b"\xff\xfe", "not UTF-8"), (b"x" * (2 << 20), "larger than")):
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(KeyFileError, match=said) as caught:
            KeyFile(str(path), "", KeyLimits()).read()
        assert caught.value.__cause__ is None
    with pytest.raises(KeyFileError):
        KeyFile("/dev/zero", "", KeyLimits()).read()


def test_a_changed_file_counts_once_it_rests_and_a_broken_one_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(gateway_keys, "LOOK_S", 0.01)
    path, trace = tmp_path / "keys", ListTrace()
    watch = KeyWatch(KeyFile(private(path, "one\n"), "", KeyLimits()), KeyLimits(), trace)

    async def until(condition):
        while not condition():  # noqa: ASYNC110 - the watch has no event for it
            await asyncio.sleep(0.005)

    async def scenario():
        task = asyncio.create_task(watch.follow())
        for number, broken in enumerate(("", "two max_requests=x", "# none\n", None)):
            if broken is None:
                path.unlink()
            else:
                private(path, broken)
            await until(lambda number=number: len(trace.named("keys.refused")) == number + 1)
            assert watch.stale
            assert watch.keys.check(b"Bearer one")
        private(path, "two\n")
        await until(lambda: trace.named("keys.loaded"))
        assert not watch.stale
        assert watch.keys.check(b"Bearer two")
        with pytest.raises(ApiError):
            watch.keys.check(b"Bearer one")
        path.chmod(0o644)
        await until(lambda: watch.stale)
        assert watch.keys.check(b"Bearer two")
        assert len(trace.named("keys.loaded")) == 1
        assert not any("two" in str(each).replace(str(path), "") for each in trace.named("keys.refused")[-1:])
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_file_under_way_is_not_read(tmp_path):
    path = tmp_path / "keys"
    file = KeyFile(private(path, "one\n"), "", KeyLimits())
    file.read()
    assert file.look() is None
    with path.open("a") as more:
        for _ in range(3):
            more.write("another-key")
            more.flush()
            assert file.look() is None
    assert len(file.look()) == 2
    assert file.look() is None


# --- limits, alone ---


@pytest.fixture
def quotas():
    clock = SimpleNamespace(ns=7)
    told = []
    made = Quotas(Ledger(), lambda: clock.ns, told.append)
    return SimpleNamespace(enter=made.enter, clock=clock, told=told)


def key(name="k", *limits):
    return ApiKey(digest_of(name.encode()), name, KeyLimits(*limits))


def refused(call, *args):
    with pytest.raises(ApiError) as caught:
        call(*args)
    headers = caught.value.headers
    return caught.value, dict(zip(headers[::2], headers[1::2], strict=True))


def test_requests_open_at_once_are_bounded_for_each_key(quotas):
    limited, other = key("a", 2), key("b", 2)
    first, _ = quotas.enter(limited), quotas.enter(limited)
    error, headers = refused(quotas.enter, limited)
    assert (error.status, error.retry_after_s, headers[b"retry-after-ms"]) == (429, 1, b"1000")
    assert quotas.told == ["max_requests"]
    quotas.enter(other)
    quotas.enter(key("c"))
    first.leave(0)
    quotas.enter(limited)
    refused(quotas.enter, limited)


def test_requests_a_minute_come_back_evenly(quotas):
    limited = key("a", 0, 3)
    left = [dict(zip(v.headers[::2], v.headers[1::2], strict=True)) for v in (quotas.enter(limited) for _ in range(3))]
    assert [each[b"x-ratelimit-remaining-requests"] for each in left] == [b"2", b"1", b"0"]
    assert left[0] | {b"x-ratelimit-limit-requests": b"3", b"x-ratelimit-reset-requests": b"20s"} == left[0]
    error, headers = refused(quotas.enter, limited)
    assert (error.status, error.retry_after_s, headers[b"x-ratelimit-reset-requests"]) == (429, 20, b"1m0s")
    quotas.clock.ns += MINUTE_NS // 3
    quotas.enter(limited)
    refused(quotas.enter, limited)


def test_tokens_a_minute_count_prompts_at_once_and_output_at_the_end(quotas):
    limited = key("a", 0, 0, 600)
    first = quotas.enter(limited)
    first.prompt(400)
    assert dict(zip(first.headers[::2], first.headers[1::2], strict=True))[b"x-ratelimit-remaining-tokens"] == b"200"
    second = quotas.enter(limited)
    error, _ = refused(second.prompt, 300)
    assert (error.status, error.retry_after_s) == (429, 10)
    assert "200 left, 300 needed" in str(error)
    second.prompt(200)
    second.leave(50)  # the mesh took none of the prompt's 200, or less
    third = quotas.enter(limited)
    third.prompt(150)
    third.leave(150)
    first.leave(700)  # output: into debt
    error, headers = refused(quotas.enter, limited)
    assert (error.retry_after_s, headers[b"x-ratelimit-remaining-tokens"]) == (31, b"0")
    error, _ = refused(quotas.enter(key("b", 0, 0, 600)).prompt, 601)
    assert (error.status, error.detail.code) == (400, "tokens_per_minute_exceeded")


# --- limits, in front of a mesh ---


def ask(mesh, name, **body):
    headers = {"x-api-key": name} if name.startswith("x-") else {"authorization": f"Bearer {name}"}
    asked = {"model": "tiny", "prompt": "fox", "max_tokens": 1} | body
    return post(mesh.url + "/v1/completions", headers=headers, json=asked)


def test_limits_hold_over_all_processes_and_keys_change_without_a_restart(tmp_path):
    path = tmp_path / "keys"
    text = f"{hashed_line('open', 'agents', KeyLimits(3))}\nx-rate requests_per_minute=1\ntokens tokens_per_minute=40\nfree\n"
    settings = {"processes": 2, "key_requests_per_minute": 1000}
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(port_for_several())
        mesh = stack.enter_context(FakeMesh(api_keys_file=private(path, text), port=port, **settings))
        open_ones = stack.enter_context(contextlib.ExitStack())
        # Each request has a connection of its own, and any process may get it.
        statuses = [ask(mesh, "x-rate").status_code for _ in range(8)]
        assert (statuses[0], set(statuses[1:])) == (200, {429})
        for _ in range(3):
            raw = open_ones.enter_context(connect(mesh))
            content = b'{"model": "tiny", "prompt": "fox", "session": "hold"}'
            head = (
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer open\r\nContent-Length: %d\r\n\r\n"
            )
            raw.sendall(head % len(content) + content)
        wait_for(lambda: sum(submit.session == "hold" for submit in mesh.submits) == 3, "three are open")
        answers = [ask(mesh, "open") for _ in range(4)]
        assert {answer.status_code for answer in answers} == {429}
        assert {answer.headers["retry-after"] for answer in answers} == {"1"}
        # Every endpoint that has work to do counts, each in its own form.
        for place in (
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/tokenize",
        ):
            for name in ("x-rate", "open"):
                answer = post(mesh.url + place, headers={"x-api-key": name}, json={})
                assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error"), place
                assert int(answer.headers["retry-after-ms"]) > 0
        # What one key has used is no other's loss.
        answer = ask(mesh, "free")
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "1000"
        assert answer.headers["x-ratelimit-remaining-requests"] == "999"
        used = [ask(mesh, "tokens", prompt="the quick brown fox", max_tokens=8)]
        while used[-1].status_code == 200 and len(used) < 12:
            used.append(ask(mesh, "tokens", prompt="the quick brown fox", max_tokens=8))
        assert (used[0].status_code, used[-1].status_code) == (200, 429)
        assert used[0].headers["x-ratelimit-limit-tokens"] == "40"
        open_ones.close()
        wait_for(lambda: ask(mesh, "open").status_code == 200, "the open ones are over")

        def every_process():
            return ask(mesh, "free").status_code == 200 and {submit.gateway for submit in mesh.submits} == {0, 1}

        wait_for(every_process, "each process has had a request")
        private(path, "another\n")
        wait_for(lambda: len(mesh.trace("keys.loaded")) == 2, "each process has read the new file")
        assert [ask(mesh, "another").status_code for _ in range(8)] == [200] * 8
        assert {ask(mesh, "free").status_code for _ in range(8)} == {401}
        private(path, "broken max_requests=\n")
        wait_for(lambda: len(mesh.trace("keys.refused")) == 2, "it is refused")
        assert ask(mesh, "another").status_code == 200

        def stale():
            text = get(mesh.url + "/metrics").text
            return text.count("\nedgemesh_api_keys_stale{") == text.count(
                "\nedgemesh_api_keys_stale{gateway="
            ) == 2 and [
                line.endswith(" 1.0") for line in text.splitlines() if line.startswith("edgemesh_api_keys_stale")
            ] == [True, True]

        wait_for(stale, "the metrics say so")
        shown = (
            get(mesh.url + "/metrics").text
            + "".join(each.read_text() for each in mesh.run_dir.parent.rglob("*.jsonl"))
            + mesh.log()
        )
        for secret in ("another", "free", "x-rate", digest_of(b"another").hex()):
            assert f'"{secret}' not in shown
            assert f"={secret}" not in shown
        assert re.search(r'edgemesh_limited_requests_total\{gateway="gateway-[01]",limit="max_requests"\}', shown)


def test_an_openai_client_waits_as_long_as_it_is_told():
    with FakeMesh(env={"EDGEMESH_API_KEYS": "k"}, key_requests_per_minute=60) as mesh:
        with OpenAI(base_url=mesh.url + "/v1", api_key="k", max_retries=0) as client:
            caught = None
            while caught is None:
                try:
                    completion(client, max_tokens=1)
                except RateLimitError as error:
                    caught = error
            assert 0 < int(caught.response.headers["retry-after-ms"]) <= 1000
            assert caught.code == "rate_limit_exceeded"
        with OpenAI(base_url=mesh.url + "/v1", api_key="k", max_retries=4) as client:
            assert [completion(client, max_tokens=1).choices for _ in range(2)]


def test_without_keys_all_clients_share_the_topologys_limits():
    with FakeMesh(key_requests_per_minute=2) as mesh:
        answers = [post(mesh.url + "/tokenize", json={"prompt": "fox"}), ask(mesh, "a"), ask(mesh, "b")]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert get(mesh.url + "/v1/models").status_code == 200


def test_a_gateway_with_unusable_keys_does_not_start(tmp_path):
    path = tmp_path / "keys"
    path.write_text("plain\n")
    os.chmod(path, 0o644)  # noqa: PTH101 - as a user would
    with FakeMesh(spawn=False, api_keys_file=str(path)) as mesh:
        assert mesh.spawn(0).wait(PATIENCE_S) == 70
        assert "open to others" in wait_for(lambda: mesh.faults, "the supervisor is told")[0]
