import json
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from synthetic_trace import TraceWriter, two_groups
from typer.testing import CliRunner

from edgemesh.cli.trace import app
from edgemesh.inspect.escape import plain
from edgemesh.inspect.terminal import duration


def run(*arguments, width=140, state=None):
    env = {"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "dumb"}
    if state is not None:
        env["XDG_STATE_HOME"] = str(state)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)


def shown(*arguments, width=140):
    result = run(*arguments, width=width)
    assert result.exit_code == 0, result.output
    return result.stdout


def cells(text, start):
    """The columns of the first line that begins so."""
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return re.split(r"\s{2,}", line.strip())


@pytest.fixture
def trace(tmp_path):
    two_groups(tmp_path)
    return tmp_path


def test_requests_lists_the_slowest_first(trace):
    text = shown("requests", "--dir", trace)
    assert cells(text, "request ") == (
        ["request", "group", "prompt", "cached", "output", "queue", "prefill", "decode", "TTFT", "e2e", "finish"]
    )
    assert cells(text, "req-slow") == (
        ["req-slow", "1", "300", "100", "4", "20.0 ms", "75.0 ms", "53.0 ms", "91.0 ms", "158 ms", "length"]
    )
    assert text.index("req-slow") < text.index("req-neighbour")
    assert "req-neighbour" not in shown("requests", "--dir", trace, "-n", 1)
    assert "req-slow" in shown("requests", "--dir", trace, "--group", 1)


@pytest.mark.parametrize("width", [30, 50, 64, 80, 100, 140])
@pytest.mark.parametrize("command", [["requests"], ["show", "req-slow"], ["ticks"], ["blame"], ["sql", "FROM events"]])
def test_no_line_is_wider_than_the_terminal(trace, command, width):
    text = shown(*command, "--dir", trace, width=width)
    if command[0] != "sql":
        assert max(map(len, text.splitlines())) <= width
    if command[0] == "requests":
        assert "158 ms" in text


def test_figures_are_never_cut_on_80_columns(trace):
    for command in (["requests"], ["show", "req-slow"]):
        assert "\u2026" not in shown(*command, "--dir", trace, width=80)


def test_show_is_a_waterfall_whose_sums_add_up(trace):
    text = shown("show", "req-s", "--dir", trace, width=120)
    assert "req-slow  group 1, length" in text
    assert "300 prompt tokens (100 cached), 4 output tokens, first token after 91.0 ms, end to end 158 ms" in text
    waterfall = text[text.index("Waterfall") : text.index("Where the time went")]
    phases = [re.split(r"\s{2,}", line.strip())[0] for line in waterfall.splitlines()[4:] if line.strip()]
    assert phases == [
        *("tokenise", "submit", "route", "place", "queue", "prefill wait", "prefill barrier", "prefill"),
        *("prefill barrier", "prefill", "decode slot", "decode", "deliver"),
    ]
    assert "tick 7: waited for group 0" in cells(waterfall, "prefill barrier")[-1]
    assert cells(waterfall, "decode  ")[1:3] == ["100 ms", "53.0 ms"]
    assert cells(waterfall, "decode  ")[-1] == "3 ticks, 43% of it waiting"
    sums = text[text.index("Where the time went") :]
    assert cells(sums, "prefill  ") == ["prefill", "68.0 ms", "43.0%"]
    assert cells(sums, "end to end") == ["end to end", "158 ms", "100.0%"]
    second = ["8", "52.0 ms", "140", "2.00 ms", "38.0 ms", "rank-0.prefill (30.0 ms)", "req-neighbour"]
    assert cells(sums, "8 ") == second  # 5 of its 7 ms at the barrier were hidden by tick 7
    assert "Decode: 3 ticks, mean 17.3 ms; the slowest" in sums
    assert cells(sums, "decode     41")[-1] == "waited for group 0"


def test_bars_lie_where_the_time_was(trace):
    text = shown("show", "req-slow", "--dir", trace, width=80)
    bars = [line[line.index("ms   ") + 5 :] if "ms   " in line else "" for line in text.splitlines()]
    starts = [len(bar) - len(bar.lstrip()) for bar in bars if "\u2588" in bar or "\u258f" in bar]
    assert starts == sorted(starts)
    assert starts[0] == 0
    longest = max((bar for bar in bars), key=lambda bar: bar.count("\u2588"))
    assert longest.count("\u2588") >= 12


def test_a_long_id_is_cut_before_the_number_of_its_choice(tmp_path):
    to = TraceWriter(tmp_path)
    name = "cmpl-" + "0123456789abcdef" * 2
    for request in (name, f"{name}/1"):
        to.event("gateway-0", "request.submitted", 0, request=request)
        to.event("gateway-0", "request.finished", 9, request=request, finish="stop")
    text = shown("requests", "--dir", tmp_path, width=90)
    assert re.search(r"cmpl-0123\w+\u2026 ", text)
    assert re.search(r"cmpl-0123\w+\u2026/1 ", text)
    assert "one of 2 choices" in shown("show", "cmpl-01/1", "--dir", tmp_path)


def test_show_says_what_a_grammar_cost(tmp_path):
    two_groups(tmp_path)
    trace = TraceWriter(tmp_path)
    about = {"request": "req-slow", "compile_ns": 2_500_000, "waited_ns": 9_000_000, "characters": 120}
    trace.event("group-1", "request.grammar", 22, **about)
    trace.event("group-1", "request.masked", 150, request="req-slow", masks=5, mask_ns=400_000, waited_ns=10_000_000)
    text = " ".join(shown("show", "req-slow", "--dir", tmp_path, width=140).split())
    assert "grammar compiled in 2.50 ms, known after 9.00 ms, 5 masks in 400 us, waited for 10.0 ms" in text


def test_show_as_json_has_every_span(trace):
    found = json.loads(shown("show", "req-slow", "--dir", trace, "--json"))
    assert sum(found["totals"].values()) == found["end"] - found["start"] == 158_000_000
    assert [span["category"] for span in found["spans"]][:2] == ["tokenise", "submit"]
    assert found["events"][0]["event"] == "request.received"


def test_show_writes_a_page(trace, tmp_path):
    out = tmp_path / "page.html"
    assert "Open it in a browser" in shown("show", "req-slow", "--dir", trace, "--html", out)
    assert out.read_text().startswith("<!doctype html>")
    assert "req-slow" in out.read_text()


def test_ticks_by_plane_and_the_slowest_with_who_was_last(trace):
    text = shown("ticks", "--dir", trace)
    assert cells(text, "decode  ") == (
        ["decode", "1", "3", "0", "6", "10.0 ms", "10.0 ms", "10.0 ms", "7.33 ms", "19.6 ms"]
    )
    slowest = text[text.index("The slowest ticks") :]
    assert cells(slowest, "prefill")[1] == "8"
    assert cells(slowest, "decode")[-1] == "waited for group 0"
    assert "prefill" not in shown("ticks", "--dir", trace, "--plane", "decode")
    figures = json.loads(shown("ticks", "--dir", trace, "--json"))
    assert figures["planes"][0]["mean_ns"] == 10_000_000
    refused = run("ticks", "--dir", trace, "--plane", "mixed")
    assert refused.exit_code == 1
    assert "planes with ticks: decode, prefill" in refused.stderr


def test_blame_names_phase_group_and_rank(trace):
    text = shown("blame", "--dir", trace)
    assert cells(text, "prefill ")[:3] == ["prefill", "106 ms", "50.5%"]
    assert cells(text, "rank-2.decode")[:4] == ["rank-2.decode", "3", "3", "2.25 ms"]
    found = json.loads(shown("blame", "--dir", trace, "--json"))
    assert found["groups"][0] == (
        {"plane": "decode", "group": 0, "ticks": 0, "last": 0, "caused_ns": 20_000_000, "waited_ns": 0}
    )


def test_export_opens_as_chrome_trace(trace, tmp_path):
    out = tmp_path / "out" / "trace.json"
    out.parent.mkdir()
    assert "2 requests" in shown("export", "--perfetto", out, "--dir", trace)
    events = json.loads(out.read_bytes())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(names.values()) >= {"requests", "gateway-0", "group-1", "rank-0.prefill", "barrier-0"}
    steps = [event for event in events if event["ph"] == "X" and names[event["pid"]] == "rank-3.prefill"]
    assert [(step["name"], step["ts"], step["dur"]) for step in steps] == (
        [("prefill 7", 21_000, 28_000), ("prefill 8", 53_000, 36_000)]
    )
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for boxes in tracks.values():
        ends = [end for _, end in sorted(boxes)]
        assert all(start >= end for (start, _), end in zip(sorted(boxes)[1:], ends, strict=False)), boxes
    spans = [event for event in events if event.get("cat") == "request" and event["id"] == "req-slow"]
    assert sum(event["ph"] == "b" for event in spans) == sum(event["ph"] == "e" for event in spans) > 5
    assert list(out.parent.iterdir()) == [out]


def test_an_export_that_cannot_be_written_leaves_nothing(trace, tmp_path):
    result = run("export", "--perfetto", tmp_path / "absent" / "x.json", "--dir", trace)
    assert result.exit_code == 1
    assert "No such file or directory" in result.stderr
    assert "absent" in result.stderr


def test_sql_answers_as_table_blocks_and_json(trace):
    query = "SELECT event, count(*) AS n FROM events WHERE actor = 'router-0' GROUP BY ALL"
    assert cells(shown("sql", query, "--dir", trace), "request.placed") == ["request.placed", "1"]
    assert json.loads(shown("sql", query, "--dir", trace, "--json")) == [{"event": "request.placed", "n": 1}]
    narrow = shown("sql", "SELECT * FROM ticks", "--dir", trace, width=60)
    assert "row 5" in narrow
    assert "The first 2 rows" in shown("sql", "FROM ticks", "--dir", trace, "-n", 2)
    refused = run("sql", "SELECT * FROM read_text('/etc/passwd')", "--dir", trace)
    assert refused.exit_code == 1
    assert "no files, no network" in " ".join(refused.stderr.split())
    assert "root:" not in refused.output


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["show", "nothing-like-it"], "the nearest ids are"),
        (["show", "req-"], "Give more of the id"),
        (["requests", "--group", "7"], "leave out --group"),
        (["requests", "--running"], "leave out"),
        (["blame", "--group", "7"], "leave out --group"),
    ],
)
def test_errors_are_one_paragraph_with_a_remedy(trace, arguments, remedy):
    result = run(*arguments, "--dir", trace)
    assert result.exit_code == 1
    assert remedy in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_without_a_run_every_command_says_how_to_get_one(tmp_path):
    for command in (["requests"], ["show", "x"], ["ticks"], ["blame"], ["tail"], ["sql", "SELECT 1"]):
        result = run(*command, state=tmp_path)
        assert result.exit_code == 1
        assert "edgemesh start" in " ".join(result.stderr.split())
        assert "Traceback" not in result.output
        assert run(*command, "--dir", tmp_path / "absent").exit_code == 1


def test_the_newest_run_is_taken_by_default(tmp_path):
    runs = tmp_path / "edgemesh" / "trace"
    for age, name in enumerate(["old", "new"]):
        to = TraceWriter(runs / name)
        to.event("gateway-0", "request.received", 0, request=f"in-{name}")
        os.utime(to.path("gateway-0"), ns=(age * 10**9, age * 10**9))
    result = run("requests", state=tmp_path)
    assert "in-new" in result.stdout
    assert "in-old" not in result.stdout


@pytest.mark.parametrize(
    "hostile", ["[bold red]x[/bold red]", "[/]", "\x1b[2J\x1b[31m", "a\nb\rc", "\u202eabc", "x" * 160]
)
def test_hostile_ids_and_reasons_are_shown_as_text(tmp_path, hostile):
    to = two_groups(tmp_path, request=hostile)
    to.event("gateway-0", "request.failed", 200, request="failed", status=500, code=hostile, reason=hostile)
    for command in (["requests"], ["show", hostile], ["blame"], ["tail", "--no-follow"], ["sql", "FROM events"]):
        text = shown(*command, "--dir", tmp_path, width=400)
        assert "\x1b" not in text
        assert "\r" not in text
        assert "\u202e" not in text
        if len(hostile) < 40:
            assert plain(hostile) in text
    assert run("show", f"{hostile} not", "--dir", tmp_path).exit_code == 1
    assert json.loads(shown("show", hostile, "--dir", tmp_path, "--json"))["request"] == hostile


def test_tail_shows_the_last_lines_and_filters(trace):
    lines = shown("tail", "--dir", trace, "--no-follow", "-n", 2).splitlines()
    assert len(lines) == 2
    assert "request.sent" in lines[0]
    assert lines[1].endswith("ttft_ns=91.0 ms e2e_ns=158 ms group=1")
    events = [
        json.loads(line)
        for line in shown("tail", "--dir", trace, "--no-follow", "--json", "--request", "req-n").splitlines()
    ]
    assert {event["event"] for event in events} == {
        *("request.received", "request.submitted", "request.queued", "request.admitted", "request.finished"),
        "tick.plan",  # one that computed it
    }
    only = shown("tail", "--dir", trace, "--no-follow", "--actor", "router", "--event", "request").splitlines()
    assert len(only) == 1


def test_tail_follows_what_is_written_until_interrupted(trace):
    command = [
        sys.executable,
        "-c",
        # Where the tests run in the background of a shell, their children ignore SIGINT.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from edgemesh.cli.trace import app; app()",
        "tail",
        "--dir",
        str(trace),
        "-n",
        "0",
    ]
    to = TraceWriter(trace)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + 120
            seen, written = b"", 0
            while b"late-" not in seen and time.monotonic() < deadline:
                # Written again and again: the first look may come after any of them.
                to.event("gateway-0", "request.received", 300 + written, request=f"late-{written}")
                written += 1
                if select.select([process.stdout], [], [], 0.1)[0]:
                    seen += os.read(process.stdout.fileno(), 1 << 16)
            assert b"late-" in seen
        finally:
            process.send_signal(signal.SIGINT)
            try:
                _, errors = process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    assert process.returncode == 0
    assert errors == b""


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "-"),
        (0, "0"),
        (999, "999 ns"),
        (1_000, "1.00 us"),
        (12_345, "12.3 us"),
        (99_960, "100 us"),
        (1_500_000, "1.50 ms"),
        (123_456_789, "123 ms"),
        (61_000_000_000, "61.0 s"),
        (7_200_000_000_000, "7,200 s"),
    ],
)
def test_durations_have_three_digits(ns, text):
    assert duration(ns) == text
