"""The process that tries grammars out: every hostile one ends in words, in a bounded time, and disturbs no other."""

import asyncio
import json
import os
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
from grammar_walks import EOS, tokenizer

from edgemesh.actors import gateway_constraints
from edgemesh.actors.gateway_constraints import WAITING, Constraints, checker
from edgemesh.api.errors import ApiError

LARK = "%llguidance {}\n"
FINE = LARK + 'start: "a" | "b"'


def schema(**keywords):
    return json.dumps({"grammars": [{"json_schema": keywords}]})


def regex(pattern):
    return f"{LARK}start: /{pattern}/"


def nested(depth, leaf, wrap):
    for _ in range(depth):
        leaf = wrap(leaf)
    return leaf


HOSTILE = {
    "optional properties": schema(type="object", properties={f"p{n}": {"type": "string"} for n in range(4000)}),
    "alternatives of properties": schema(
        allOf=[
            {"anyOf": [{"type": "object", "properties": {f"{x}{n}": {"type": "string"}}} for x in "ab"]}
            for n in range(16)
        ]
    ),
    "a large prime": schema(type="integer", multipleOf=1000003),
    "a deep constant": schema(const=nested(400, 1, lambda inner: [inner])),
    "intersected patterns": schema(allOf=[{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(1, 12)]),
    "repeated repeats": regex("(a{1000}){1000}"),
    "a chain of rules": LARK + "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(40_000)) + '\nr40000: "a"',
    "a tree of rules": LARK + "start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(40)) + '\nr40: "a"',
    "a tree of terminals": LARK
    + "start: R0\n"
    + "\n".join(f"R{n}: R{n + 1} R{n + 1}" for n in range(40))
    + '\nR40: "a"',
    "rules that go round": LARK + "start: start",
    "too many alternatives": LARK + "start: " + " | ".join(f'"w{n}" x' for n in range(5000)) + '\nx: "a"',
    "a repeat without end": LARK + 'start: "a"{1000000}',
}


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer().to_str())
    return path, tmp_path / "checker.log"


def checked(files, *steps):
    """Run ``async step(constraints)`` one after the other, with one process."""

    async def run():
        constraints = Constraints(checker(files[0], tokenizer().get_vocab_size(), (EOS,), files[1]))
        try:
            return [await step(constraints) for step in steps]
        finally:
            constraints.close()

    return asyncio.run(run())


def checks(source, of="guided_grammar"):
    """A step: why the source is refused, "" where it is not, and how long that took."""

    async def step(constraints):
        start, refused = time.monotonic(), None
        try:
            await constraints.check(SimpleNamespace(grammar=source, grammar_of=of))
        except ApiError as error:
            refused = error
        took_s = time.monotonic() - start
        if refused is None:
            return "", took_s
        assert (refused.status, refused.detail.param) == (400, of), refused.detail
        return refused.detail.message, took_s

    return step


def test_hostile_grammars_are_refused_in_bounded_time_and_memory(files):
    async def beside(constraints):
        """All of them at once, and fine ones that come meanwhile."""
        fine = [checks(f'{LARK}start: "a{n}"') for n in range(8)]
        return await asyncio.gather(*(each(constraints) for each in [*map(checks, HOSTILE.values()), *fine]))

    (first, _), found = checked(files, checks(FINE), beside)
    assert first == ""
    told = dict(zip(HOSTILE, found, strict=False))
    assert {name: fault for name, (fault, _) in told.items() if not fault} == {}
    assert all(len(fault) < 1000 for fault, _ in found)
    assert [fault for fault, _ in found[len(HOSTILE) :] if fault] == []


def test_a_verdict_is_remembered(files):
    slow = schema(type="integer", multipleOf=1000003)
    once, again, other = checked(
        files, *(checks(slow, of) for of in ("guided_json", "guided_json", "structured_outputs.json"))
    )
    assert again[1] < once[1] / 3
    assert once[0] == again[0]
    assert "`structured_outputs.json`" in other[0]


def test_the_same_source_is_tried_once_for_all_who_ask(files):
    async def at_once(constraints):
        found = await asyncio.gather(*(checks(FINE)(constraints) for _ in range(2 * WAITING)))
        return {fault for fault, _ in found}

    assert checked(files, at_once) == [{""}]


def test_too_many_at_once_are_told_to_come_again(files):
    async def at_once(constraints):
        sources = [f'{LARK}start: "{n}"' for n in range(WAITING + 8)]
        jobs = [SimpleNamespace(grammar=source, grammar_of="guided_grammar") for source in sources]
        found = await asyncio.gather(*(constraints.check(job) for job in jobs), return_exceptions=True)
        return [each.status for each in found if each is not None]

    assert checked(files, at_once) == [[429] * 8]


def test_a_process_that_is_killed_is_started_again(files):
    def children():
        return [
            each.pid for each in psutil.Process().children() if "edgemesh.grammar.checker" in " ".join(each.cmdline())
        ]

    async def kill(_):
        for pid in children():
            os.kill(pid, signal.SIGKILL)

    found = checked(files, checks(FINE), kill, checks(LARK + 'start: "c"'))
    assert (found[0][0], found[2][0]) == ("", "")
    assert children() == []


def test_a_process_that_cannot_start_is_no_fault_of_the_client(files):
    files[0].write_text("{}")

    async def step(constraints):
        with pytest.raises(ApiError) as caught:
            await constraints.check(SimpleNamespace(grammar=FINE, grammar_of="guided_grammar"))
        return caught.value.status

    assert checked(files, step) == [503]
    assert "tokenizer.json" in files[1].read_text()


def test_no_more_verdicts_than_so_many_are_kept(files, monkeypatch):
    monkeypatch.setattr(gateway_constraints, "KEPT", 3)

    async def kept(constraints):
        return len(constraints._kept)

    assert checked(files, *(checks(f'{LARK}start: "{n}"') for n in range(5)), kept)[-1] == 3
