import json
import os
import time
from pathlib import Path

import pytest
from synthetic_trace import BASE, BOOT, MS, TraceWriter, line, two_groups

from edgemesh.inspect import blame as blaming
from edgemesh.inspect import queries
from edgemesh.inspect.facts import Category
from edgemesh.inspect.store import TraceError, newest_trace, open_trace, trace_files


def rows(trace, query):
    return trace.execute(query).fetchall()


def test_the_whole_path_of_a_request_adds_up_to_its_end_to_end_time(tmp_path):
    two_groups(tmp_path)
    with open_trace(tmp_path) as trace:
        slow, quick = queries.slowest_requests(trace)
    assert [slow.request, quick.request] == ["req-slow", "req-neighbour"]
    assert {category: ns / MS for category, ns in slow.totals.items()} == {
        Category.TOKENISE: 2,
        Category.SUBMIT: 1,
        Category.ROUTE: 1,
        Category.PLACE: 1,
        Category.QUEUE: 10,
        Category.PREFILL_WAIT: 1,
        Category.PREFILL_BARRIER: 6,
        Category.PREFILL: 68,
        Category.SLOT: 10,
        Category.DECODE_WAIT: 1,
        Category.DECODE_BARRIER: 22,
        Category.DECODE: 30,
        Category.DELIVER: 5,
    }
    assert slow.e2e_ns == 158 * MS == sum(slow.totals.values())
    assert (slow.group, slow.prompt_tokens, slow.cached_tokens, slow.output_tokens) == (1, 300, 100, 4)
    assert (slow.ttft_ns, slow.sent_ns, slow.finish) == (91 * MS, MS // 2, "length")


def test_a_tick_knows_the_ranks_of_the_whole_coupled_set_and_who_was_last(tmp_path):
    two_groups(tmp_path)
    with open_trace(tmp_path) as trace:
        slow = queries.slowest_requests(trace, limit=1)[0]
    first, second = slow.prefill
    assert [step.rank for step in first.steps] == [f"rank-{rank}.prefill" for rank in range(4)]
    assert first.slowest.rank == "rank-3.prefill"
    assert second.slowest.rank == "rank-0.prefill"
    assert second.requests == ("req-slow", "req-neighbour")
    assert [tick.tick for tick in slow.decode.worst] == [41, 40, 42]
    assert slow.decode.worst[0].last == 0


def test_groups_that_are_not_coupled_do_not_share_ticks(tmp_path):
    to = TraceWriter(tmp_path)
    for group in (0, 1):
        to.tick(group, "decode", 3, (0, 0, 10 + group))
        to.step(group, "decode", 3, 9, group=group, own_ms=5 + group, whole_ms=9)
    with open_trace(tmp_path) as trace:
        ticks = queries.ticks_between(trace, 0, 2 * BASE)
    assert {tick.group: [step.rank for step in tick.steps] for tick in ticks} == {
        0: ["rank-0.decode"],
        1: ["rank-1.decode"],
    }


def test_a_step_that_was_held_says_for_how_long_and_until_when(tmp_path):
    to = TraceWriter(tmp_path)
    to.tick(0, "decode", 3, (10, 14, 20), paced_ns=7 * MS)
    to.tick(0, "decode", 4, (30, 31, 40))
    with open_trace(tmp_path) as trace:
        held, at_once = queries.ticks_between(trace, 0, 2 * BASE)
    assert (held.paced_ns, held.made) == (7 * MS, held.arrive)
    assert at_once.paced_ns == 0


def test_blame_names_the_group_and_the_rank_that_others_waited_for(tmp_path):
    two_groups(tmp_path)
    with open_trace(tmp_path) as trace:
        timelines = queries.slowest_requests(trace)
        found = blaming.blame(timelines, queries.ticks_between(trace, 0, 2 * BASE))
    assert found.e2e_ns == (158 + 52) * MS
    assert found.phases[0].category is Category.PREFILL
    assert sum(share.total_ns for share in found.phases) == found.e2e_ns
    assert sum(share.share for share in found.phases) == pytest.approx(1)
    worst = next(row for row in found.groups if row.plane == "decode")
    assert (worst.group, worst.caused_ns) == (0, 20 * MS)
    ranks = {row.rank: row for row in found.ranks}
    assert (ranks["rank-2.decode"].slowest, ranks["rank-2.decode"].behind_ns) == (3, 3 * (7 * MS - 25 * MS // 4))
    assert ranks["rank-1.prefill"].slowest == 0


def test_runs_that_share_a_directory_keep_their_ticks_apart(tmp_path):
    to = TraceWriter(tmp_path)
    for start in (0, 1000):
        to.event("supervisor-0", "actor.spawned", start, name="vault-0", pid=1)
        to.event("supervisor-0", "actor.spawned", start + 1, name="group-0", pid=2)
        to.event("group-0", "request.joined", start + 9, request=f"r{start}", slot=0)
        to.tick(0, "decode", 0, (start + 10, start + 11, start + 20))
        to.step(0, "decode", 0, start + 19, group=0, own_ms=4, whole_ms=8)
        to.event("group-0", "request.finished", start + 20, request=f"r{start}", finish="stop")
    with open_trace(tmp_path) as trace:
        ticks = queries.ticks_between(trace, 0, 2 * BASE)
        assert [(tick.run, tick.run_ns, len(tick.steps), tick.previous) for tick in ticks] == (
            [(1, 9 * MS, 1, None), (2, 9 * MS, 1, None)]
        )
        assert len(queries.slowest_ticks(trace)) == 2
        assert {each.decode.count for each in queries.timelines(trace, ["r0", "r1000"])} == {1}
        assert blaming.blame([], ticks).ranks[0].ticks == 2


def test_torn_garbled_and_foreign_lines_are_left_out_and_the_rest_is_kept(tmp_path):
    to = TraceWriter(tmp_path)
    garbage = [
        b'{"ts": 17',
        b"\x00\xff\xfe garbage",
        b"[1, 2, 3]",
        b"null",
        b'"text"',
        b"",
        b'{"ts": "x", "mono": {}, "event": []}',
        b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}",
        json.dumps({"ts": 10**30, "mono": 1, "event": "too.big"}).encode(),
    ]
    for place, each in enumerate(garbage):
        to.event("group-0", "request.queued", place, request=f"r{place}")
        to.raw("group-0", each + b"\n")
    to.event("group-0", "request.queued", 99, request="last")
    to.raw("group-0", line("group-0", "request.queued", 100, request="torn")[:-20])
    with open_trace(tmp_path) as trace:
        kept = [row[0] for row in rows(trace, "SELECT request FROM events ORDER BY seq")]
    assert kept == [*(f"r{place}" for place in range(len(garbage))), "last"]


def test_fields_of_a_wrong_type_read_as_null_and_unknown_ones_are_kept(tmp_path):
    to = TraceWriter(tmp_path)
    to.event("group-0", "tick.plan", 0, plane="decode", tick="seven", tokens=[3, 4], novel={"deep": [1]}, requests="x")
    to.event("rank-0.decode", "tick.step", 1, plane="decode", tick=7, group="group-2", step_ns=5)
    with open_trace(tmp_path) as trace:
        tick, tokens, per_group, deep, named = rows(
            trace,
            "SELECT tick, tokens, group_tokens, record->'$.novel.deep[0]', requests FROM events WHERE event='tick.plan'",
        )[0]
        assert (tick, tokens, per_group, deep) == (None, None, [3, 4], "1")
        assert not named
        assert rows(trace, 'SELECT "group" FROM steps') == [(2,)]


def test_rotated_files_are_read_oldest_first_under_both_names(tmp_path):
    to = TraceWriter(tmp_path)
    for number in range(4):
        to.event("rank-3.prefill", "tick.step", 0, plane="prefill", tick=number)
        if number < 3:
            to.rotate("rank-3.prefill")
    other = tmp_path / "rank-3.prefill.jsonl.4"
    other.write_bytes(line("rank-3.prefill", "tick.step", 0, plane="prefill", tick=-1))
    (tmp_path / "notes.jsonl").write_text("not an actor's")
    assert [file.age for file in trace_files(tmp_path)] == [-4, -3, -2, -1, 0]
    with open_trace(tmp_path) as trace:
        assert [row[0] for row in rows(trace, "SELECT tick FROM events ORDER BY seq")] == [-1, 0, 1, 2, 3]


def test_a_rotation_between_listing_and_reading_is_looked_at_again(tmp_path, monkeypatch):
    to = TraceWriter(tmp_path)
    to.event("group-0", "tick.plan", 0, plane="decode", tick=0)
    listed = trace_files
    looks = 0

    def rotating(directory):
        nonlocal looks
        found = listed(directory)
        looks += 1
        if looks == 1:
            to.rotate("group-0")
            to.event("group-0", "tick.plan", 1, plane="decode", tick=1)
        return found

    monkeypatch.setattr("edgemesh.inspect.store.trace_files", rotating)
    with open_trace(tmp_path) as trace:
        assert rows(trace, "SELECT tick FROM events ORDER BY seq") == [(0,), (1,)]


def test_a_file_that_vanishes_at_every_look_is_reported_not_raised(tmp_path, monkeypatch):
    TraceWriter(tmp_path).event("group-0", "tick.plan", 0)
    gone = [*trace_files(tmp_path)]
    gone[0].path.unlink()
    monkeypatch.setattr("edgemesh.inspect.store.trace_files", lambda directory: gone)
    with pytest.raises(TraceError, match="5 attempts"):
        open_trace(tmp_path)


def test_each_look_at_a_growing_trace_sees_more(tmp_path):
    to = TraceWriter(tmp_path)
    for number in range(3):
        to.event("gateway-0", "request.received", number, request=f"r{number}")
        with open_trace(tmp_path) as trace:
            assert len(queries.request_ids(trace)) == number + 1
            assert {timeline.finish for timeline in queries.slowest_requests(trace)} == {"running"}


def test_a_stepped_wall_clock_reorders_nothing_and_hosts_keep_their_own_offset(tmp_path):
    records = [
        ("gateway-0", BASE, BASE - BOOT),
        ("group-0", BASE - 300 * MS, BASE - BOOT + 5 * MS),  # the wall clock went back 305 ms
        ("rank-0.decode", BASE + 7 * MS, 7 * MS),  # another host, booted just now
    ]
    for actor, ts, mono in records:
        record = {"ts": ts, "mono": mono, "actor": actor, "epoch": 0, "event": "x"}
        (tmp_path / f"{actor}.jsonl").write_text(json.dumps(record) + "\n")
    with open_trace(tmp_path) as trace:
        found = dict(rows(trace, "SELECT actor, at_ns FROM events"))
    assert found["group-0"] - found["gateway-0"] == 5 * MS
    assert found["rank-0.decode"] == BASE + 7 * MS


@pytest.mark.parametrize("name", ["plain", "[ab]*?", "a'b", 'quo"te', "new\nline", "ünïcode"])
def test_a_directory_may_have_any_name(tmp_path, name):
    two_groups(tmp_path / name)
    with open_trace(tmp_path / name) as trace:
        assert len(queries.request_ids(trace)) == 2


def test_no_directory_no_files_and_no_events_each_say_what_to_do(tmp_path):
    with pytest.raises(TraceError, match=r"not a directory; name .* --dir"):
        open_trace(tmp_path / "absent")
    with pytest.raises(TraceError, match=r"no trace files in .*--dir"):
        open_trace(tmp_path)
    (tmp_path / "group-0.jsonl").write_bytes(b"")
    with pytest.raises(TraceError, match="no events yet"):
        open_trace(tmp_path)


def test_the_newest_run_is_the_one_written_last(tmp_path):
    for number, name in enumerate(["b", "a", "c"]):
        to = TraceWriter(tmp_path / name)
        to.event("group-0", "x", 0)
        os.utime(to.path("group-0"), ns=(number, number if name != "a" else 10**15))
    (tmp_path / "empty").mkdir()
    assert newest_trace([*tmp_path.iterdir(), tmp_path / "absent"]) == tmp_path / "a"
    assert newest_trace([tmp_path / "empty"]) is None


def test_an_id_is_found_by_its_beginning_when_that_is_unique(tmp_path):
    two_groups(tmp_path)
    with open_trace(tmp_path) as trace:
        assert queries.find_request(trace, "req-s") == "req-slow"
        assert queries.find_request(trace, "req-slow") == "req-slow"
        with pytest.raises(TraceError, match=r"2 requests begin with 'req-'.*req-neighbour, req-slow"):
            queries.find_request(trace, "req-")
        with pytest.raises(TraceError, match="nearest ids are req-slow"):
            queries.find_request(trace, "reqslow")


def test_every_choice_of_a_request_begins_with_what_the_gateway_did_for_all(tmp_path):
    to = TraceWriter(tmp_path)
    to.event("gateway-0", "request.received", 3, request="cmpl-1", endpoint="completions", external="mine")
    to.event("gateway-0", "request.tokenised", 5, request="cmpl-1", prompt_tokens=7, ns=MS)
    for place, request in enumerate(["cmpl-1", "cmpl-1/1"]):
        to.event("gateway-0", "request.submitted", 6, request=request, attempt=0, choice=place)
        to.event(f"group-{place}", "request.queued", 10 + place, request=request, prompt_tokens=7, waiting=1)
        to.event(f"group-{place}", "request.finished", 50 + place, request=request, finish="stop", output_tokens=2)
    to.event("gateway-0", "request.sent", 59, request="cmpl-1", tokens=4, ns=MS)
    for place, request in enumerate(["cmpl-1", "cmpl-1/1"]):
        ended = {"finish": "stop", "e2e_ns": 60 * MS, "group": place, "output_tokens": 2}
        to.event("gateway-0", "request.finished", 60, request=request, **ended)
    with open_trace(tmp_path) as trace:
        first, second = queries.slowest_requests(trace)
        assert queries.find_request(trace, "cmpl") == "cmpl-1"
        assert queries.find_request(trace, "mine") == "cmpl-1"
        assert queries.find_request(trace, "cmpl-1/1") == "cmpl-1/1"
        assert [each.request for each in queries.slowest_requests(trace, group=1)] == ["cmpl-1/1"]
        assert queries.timelines(trace, ["cmpl-1/1"]) == [second]
    assert {category: ns / MS for category, ns in second.totals.items()} == {
        Category.RECEIVE: 3,
        Category.TOKENISE: 2,
        Category.SUBMIT: 1,
        Category.ROUTE: 5,
        Category.QUEUE: 40,
        Category.DELIVER: 9,
    }
    assert first.e2e_ns == second.e2e_ns == 60 * MS
    assert second.group == 1


def test_a_choice_ends_when_the_client_of_its_request_leaves(tmp_path):
    to = TraceWriter(tmp_path)
    to.event("gateway-0", "request.received", 0, request="r")
    to.event("gateway-0", "request.submitted", 1, request="r/1")
    to.event("gateway-0", "request.aborted", 5, request="r")
    to.event("group-0", "request.aborted", 6, request="r/1")
    with open_trace(tmp_path) as trace:
        assert queries.slowest_requests(trace, running=True) == []
        assert [(each.finish, each.e2e_ns) for each in queries.slowest_requests(trace)] == [("abort", 5 * MS)] * 2


def big_trace(directory: Path, events: int) -> None:
    to = TraceWriter(directory)
    groups: dict[str, list[bytes]] = {"group-0": [], "rank-0.decode": [], "gateway-0": []}
    for tick in range(events // 4):
        at = tick * 0.5
        shared = {"plane": "decode", "tick": tick}
        groups["group-0"] += [
            line("group-0", "tick.arrive", at, **shared, tokens=8, sequences=8),
            line("group-0", "tick.plan", at + 0.1, **shared, tokens=8, sequences=8, requests=[], idle=False, hold=""),
            line("group-0", "tick.done", at + 0.4, **shared, step_ns=300_000, wait_ns=1),
        ]
        step = {"step_ns": 290_000, "collective_ns": 9, "tokens": 8, "group": 0}
        groups["rank-0.decode"].append(line("rank-0.decode", "tick.step", at + 0.4, **shared, **step))
    last = events // 4 - 1
    for number in range(60):
        begun, request = number * 100, f"r{number}"
        groups["gateway-0"].append(line("gateway-0", "request.received", begun, request=request))
        groups["group-0"] += [
            line("group-0", "request.joined", begun + 1, request=request, slot=0, tick=number * 200),
            line("group-0", "request.finished", begun + 900, request=request, tick=min(number * 200 + 1800, last)),
        ]
        groups["gateway-0"].append(line("gateway-0", "request.finished", begun + 901, request=request, finish="stop"))
    for actor, lines in groups.items():
        to.raw(actor, b"".join(lines))


def test_a_trace_of_200_000_events_is_answered_within_seconds(tmp_path):
    big_trace(tmp_path, 200_000)
    begun = time.process_time()
    with open_trace(tmp_path) as trace:
        assert rows(trace, "SELECT count(*) FROM events")[0][0] >= 200_000
        timelines = queries.slowest_requests(trace, limit=60)
        stats = queries.plane_stats(trace)
        slowest = queries.slowest_ticks(trace)
    assert len(timelines) == 60
    assert max(timeline.decode.count for timeline in timelines) > 1_000
    assert stats[0].ticks == 50_000
    assert len(slowest) == 10
    assert time.process_time() - begun < 15
