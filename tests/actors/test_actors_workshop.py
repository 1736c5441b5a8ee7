"""Real workers: grammars that kill or stall theirs cost one request each, and nobody else's stream a token."""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))
from grammar_models import OBJECT, kind, lark, schema

from edgemesh.actors import workshop as module
from edgemesh.actors.workshop import Workshop, starter
from edgemesh.runtime.clock import monotonic_ns

DEEP = lark("start: r0\n" + "\n".join(f'r{at}: "a" r{at + 1} | "b"' for at in range(25_000)) + '\nr25000: "c"')
"""A chain so long that the library overflows its stack."""

LONG = schema({"type": "object", "properties": {f"p{at}": {"enum": [at, str(at), [at]]} for at in range(4000)}})
"""Seconds of work."""


PATIENCE_S = 120.0
"""How long a question may take, and a test waits: what takes that long is never answered, however busy the machine is."""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_NS", int(PATIENCE_S * 1e9))


@pytest.fixture
def shop(tmp_path):
    data, eos, size = kind("byte level")
    (tmp_path / "tokenizer.json").write_bytes(data)
    opened = Workshop(starter(tmp_path / "tokenizer.json", eos, size, tmp_path / "log", "grammar-0"), monotonic_ns)
    yield opened
    opened.close()


def wait(shop, count=1, seconds=2 * PATIENCE_S):
    """Take what is found until there is so much of it, as a group's loop would."""
    found, until = [], time.monotonic() + seconds
    while len(found) < count:
        assert time.monotonic() < until, f"{found}, and no more"
        due = shop.deadline()
        timeout = 1.0 if due is None else max(0, min(1.0, (due - shop.now()) / 1e9))
        select.select([fd for fd in (shop.fileno(),) if fd is not None], [], [], timeout)
        found += shop.take()
    return found


def first(mask):
    return next(8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1)


def test_a_stream_is_followed_from_token_to_token_until_only_the_end_may_follow(shop):
    shop.ask(1, lark('start: "a" "b"'), ())
    masks = wait(shop)
    assert masks[0].compile_ns > 0
    while not masks[-1].ended:
        assert masks[-1].mask_ns > 0
        shop.ask(1, "", (first(masks[-1].mask),))
        masks += wait(shop)
    assert (len(masks), masks[-1].mask, masks[-1].compile_ns) == (3, b"", 0)


def test_nothing_runs_until_something_is_asked(shop):
    assert (shop.fileno(), shop.deadline(), shop.take()) == (None, None, [])


def test_a_bad_source_and_a_wrong_token_are_told_from_each_other(shop):
    shop.ask(1, "nonsense", ())
    (bad,) = wait(shop)
    assert (bool(bad.error), bad.drawn) == (True, False)
    shop.ask(2, lark('start: "a"'), (0,))
    (wrong,) = wait(shop)
    assert "does not fit the grammar" in wrong.error
    assert wrong.drawn


def test_a_grammar_that_ends_its_worker_costs_only_itself(shop):
    shop.ask(1, schema(OBJECT), ())
    (before,) = wait(shop)
    shop.ask(1, "", (first(before.mask),))
    (second,) = wait(shop)
    shop.ask(2, DEEP, ())
    shop.ask(1, "", (first(second.mask),))
    shop.ask(3, lark('start: "a"'), ())
    found = {each.key: each for each in wait(shop, 3)}
    assert "too large or too deep" in found[2].error
    assert not found[1].error + found[3].error
    shop.ask(4, schema(OBJECT), (first(before.mask), first(second.mask)))
    (same,) = wait(shop)
    assert same.mask == found[1].mask, "the new worker has come as far as the old one"


def test_a_grammar_that_takes_too_long_ends_its_worker_and_costs_only_itself(tmp_path):
    data, eos, size = kind("byte level")
    (tmp_path / "tokenizer.json").write_bytes(data)
    start = starter(tmp_path / "tokenizer.json", eos, size, tmp_path / "log", "grammar-0", cpu_s=0.2)
    with contextlib.closing(Workshop(start, monotonic_ns)) as shop:
        shop.ask(1, schema(OBJECT), ())
        (before,) = wait(shop)
        shop.ask(2, LONG, ())
        shop.ask(1, "", (first(before.mask),))
        found = {each.key: each for each in wait(shop, 2)}
    assert "it takes more than" in found[2].error
    assert found[1].mask
    assert not found[1].error


def test_a_worker_that_hangs_is_replaced(shop, monkeypatch):
    shop.ask(1, schema(OBJECT), ())
    (before,) = wait(shop)
    monkeypatch.setattr(module, "PATIENCE_NS", 5_000_000_000)
    os.kill(shop._pid, signal.SIGSTOP)
    shop.ask(2, schema(OBJECT), ())
    shop.ask(1, "", (first(before.mask),))
    (late,) = wait(shop)
    assert (late.key, "more than 5 s" in late.error) == (2, True)
    monkeypatch.setattr(module, "PATIENCE_NS", int(PATIENCE_S * 1e9))
    (other,) = wait(shop)
    assert (other.key, other.error) == (1, "")


def test_nobody_waits_until_a_killed_worker_is_gone(shop, monkeypatch):
    shop.ask(1, schema(OBJECT), ())
    (before,) = wait(shop)
    asked, wait_for = [], os.waitpid

    def waitpid(pid, options):
        asked.append(options)
        return wait_for(pid, options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "waitpid", waitpid)
        os.kill(shop._pid, signal.SIGKILL)
        shop.ask(1, "", (first(before.mask),))
        (after,) = wait(shop)
    assert (after.key, bool(after.error)) == (1, True)
    shop.ask(2, schema(OBJECT), ())
    assert [each.key for each in wait(shop)] == [2]
    assert 0 not in asked


def test_a_stream_that_is_dropped_is_not_answered(shop):
    shop.ask(1, schema(OBJECT), ())
    shop.ask(2, schema(OBJECT), ())
    shop.drop(1)
    assert [each.key for each in wait(shop)] == [2]
    assert shop.deadline() is None


def test_more_than_a_socket_holds_gets_there(shop):
    long = "x" * 900_000
    for key in range(6):
        shop.ask(key, lark(f'start: "a"\n// {key} {long}'), ())
    assert {each.key for each in wait(shop, 6)} == set(range(6))


def test_a_model_without_a_tokenizer_takes_no_grammar_and_says_why(tmp_path):
    start = starter(tmp_path / "none.json", (), 100, tmp_path / "log", "grammar-0")
    with contextlib.closing(Workshop(start, monotonic_ns)) as shop:
        shop.ask(1, schema(OBJECT), ())
        (found,) = wait(shop)
        assert "no grammar can be used with this model" in found.error
        shop.ask(2, schema(OBJECT), ())
        assert wait(shop)[0].error == found.error


def test_a_worker_that_never_starts_is_given_up(tmp_path):
    def start(_descriptor):
        return os.posix_spawn("/bin/false", ["false"], {}, setpgroup=0)

    with contextlib.closing(Workshop(start, monotonic_ns)) as shop:
        shop.ask(1, schema(OBJECT), ())
        assert "failed to start 3 times" in wait(shop)[0].error


def test_a_worker_that_cannot_be_spawned_is_an_error_of_that_request(tmp_path):
    def start(_descriptor):
        raise OSError(11, "no more processes")

    shop = Workshop(start, monotonic_ns)
    for key in (1, 2):
        shop.ask(key, schema(OBJECT), ())
        assert "no more processes" in wait(shop)[0].error


def test_a_worker_ends_with_whoever_started_it(shop):
    shop.ask(1, schema(OBJECT), ())
    wait(shop)
    pid, shop._socket = shop._pid, shop._socket.close()
    until = time.monotonic() + PATIENCE_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is None:
        assert time.monotonic() < until
        select.select([], [], [], 0.01)
