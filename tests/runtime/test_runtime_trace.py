import threading
import time
from unittest.mock import Mock

import msgspec
import pytest

from edgemesh.runtime import trace as module
from edgemesh.runtime.clock import VirtualClock
from edgemesh.runtime.trace import FileTrace
from edgemesh.wire.ids import Plane


@pytest.fixture
def open_trace(tmp_path):
    traces = []

    def make(**options):
        traces.append(FileTrace(tmp_path / "trace", "group-0", 2, **options))
        return traces[-1]

    yield make
    for trace in traces:
        trace.close()


def lines(tmp_path, name="group-0.jsonl"):
    return [msgspec.json.decode(line) for line in (tmp_path / "trace" / name).read_bytes().splitlines()]


def test_an_event_is_a_line_with_both_clocks(open_trace, tmp_path):
    trace = open_trace(clock=VirtualClock(77))
    trace.event("tick.plan", plane=Plane.DECODE, tick=3, requests=["a", "b"], hold="", last=None)
    trace.flush()
    assert lines(tmp_path) == [
        {
            "ts": 77,
            "mono": 77,
            "actor": "group-0",
            "epoch": 2,
            "event": "tick.plan",
            "plane": "decode",
            "tick": 3,
            "requests": ["a", "b"],
            "hold": "",
            "last": None,
        }
    ]
    assert (tmp_path / "trace" / "group-0.jsonl").stat().st_mode & 0o777 == 0o600


def test_text_stays_on_one_line_is_bounded_and_secrets_are_not_written(open_trace, tmp_path):
    trace = open_trace()
    trace.event("x", reason="two\nlines", long="a" * 100_000, api_key="sk-1", authorization="Bearer", odd=object)
    trace.flush()
    (line,) = lines(tmp_path)
    assert line["reason"] == "two\nlines"
    assert len(line["long"]) < 9000
    assert line["api_key"] == line["authorization"] == "[secret]"
    assert line["odd"] == "<class 'object'>"


def test_levels(open_trace, tmp_path):
    info, debug, off = open_trace(), open_trace(level="debug"), open_trace(level="off")
    for trace in (info, debug, off):
        trace.event("event", of=trace._level)
        trace.detail("detail", of=trace._level)
        trace.flush()
    assert [(line["event"], line["of"]) for line in lines(tmp_path)] == [
        ("event", "info"),
        ("event", "debug"),
        ("detail", "debug"),
    ]


def test_rotation_keeps_a_bounded_number_of_whole_files(open_trace, tmp_path):
    trace = open_trace(max_bytes=1000, files=2)
    for number in range(100):
        trace.event("n", number=number)
        trace.flush()
    files = sorted(path.name for path in (tmp_path / "trace").iterdir())
    assert files == ["group-0.1.jsonl", "group-0.2.jsonl", "group-0.jsonl"]
    numbers = [line["number"] for name in (files[1], files[0], files[2]) for line in lines(tmp_path, name)]
    assert numbers == list(range(numbers[0], 100))
    assert all((tmp_path / "trace" / name).stat().st_size <= 1000 for name in files)


def test_a_full_buffer_is_written_without_being_asked(open_trace, tmp_path):
    trace = open_trace()
    for number in range(module.BUFFERED_LINES):
        trace.event("n", number=number)
    assert len(lines(tmp_path)) == module.BUFFERED_LINES


def test_a_full_disk_stops_nobody_and_is_told_later(open_trace, tmp_path, monkeypatch):
    trace = open_trace()
    whole = trace._file.write

    def full(_data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace._file, "write", full)
    for _ in range(2):
        trace.event("lost")
        trace.flush()
    monkeypatch.setattr(trace._file, "write", whole)
    trace.event("kept")
    trace.flush()
    assert [(line["event"], line.get("lines")) for line in lines(tmp_path)] == [("trace.lost", 2), ("kept", None)]


def test_two_threads_lose_nothing(open_trace, tmp_path):
    trace = open_trace()
    over = threading.Event()

    def flush():
        while not over.is_set():
            trace.flush()

    thread = threading.Thread(target=flush)
    thread.start()
    for number in range(5000):
        trace.event("n", number=number)
    over.set()
    thread.join()
    trace.flush()
    assert [line["number"] for line in lines(tmp_path)] == list(range(5000))


def test_an_event_costs_little_more_than_the_encoding_of_its_line(open_trace):
    """An actor's thread encodes, and leaves the writing to another one."""
    trace, encoder = open_trace(), msgspec.json.Encoder()
    fields = {"plane": "decode", "tick": 7, "tokens": 5, "sequences": 2, "requests": ["a"], "idle": False}

    def best(call):
        found = []
        for _ in range(20):
            began = time.thread_time_ns()
            for _ in range(200):
                call()
            found.append(time.thread_time_ns() - began)
            trace.flush()
        return min(found)

    ours = best(lambda: trace.event("tick.plan", **fields))
    encoding = best(lambda: encoder.encode({"ts": 1 << 60, "mono": 1 << 40, "actor": "group-0", "epoch": 0} | fields))
    assert ours < 20 * encoding


def test_a_rotation_that_fails_writes_into_no_file_but_its_own(open_trace, tmp_path, monkeypatch):
    trace = open_trace(max_bytes=1000, files=2)
    trace.event("before", text="x" * 900)
    trace.flush()
    with monkeypatch.context() as broken:
        broken.setattr(module.os, "open", Mock(side_effect=OSError(24, "Too many open files")))
        for _ in range(3):
            trace.event("lost", text="x" * 900)
            trace.flush()
    with (tmp_path / "other").open("w+b") as other:
        trace.event("after")
        trace.flush()
        assert other.read() == b""
    assert [line["event"] for line in lines(tmp_path)] == ["trace.lost", "after"]
    assert [line["event"] for line in lines(tmp_path, "group-0.1.jsonl")] == ["before"]
    assert not (tmp_path / "trace" / "group-0.2.jsonl").exists()


def test_a_link_in_the_place_of_a_trace_is_not_followed(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "group-0.jsonl").symlink_to(mine)
    with pytest.raises(OSError, match="symbolic links"):
        FileTrace(tmp_path / "trace", "group-0", 0)
    assert mine.read_text() == "precious"
