"""Two stored loads: what they are compared by, what makes the comparison doubtful, and the picture of it."""

import json
import math
import xml.etree.ElementTree as ET

import msgspec
import pytest
from typer.testing import CliRunner

from edgemesh.bench import prompts
from edgemesh.bench.compare import COLOURS, PANEL_H, PANEL_W, differences, picture, rows
from edgemesh.bench.load import Load
from edgemesh.bench.prompts import Shape
from edgemesh.bench.report import ReportError, read, report, write
from edgemesh.bench.statistics import Call, summarise
from edgemesh.cli.bench import app

MS = 1_000_000


def made(step_ms, *, tokens=5, calls=20, failed=0, load=None, cached=0):
    """Calls one after the other; a call's n-th token comes ``n * step_ms`` after its start."""
    good = [
        Call(
            index * tokens * step_ms * MS,
            (index + 1) * tokens * step_ms * MS,
            tuple((index * tokens + token + 1) * step_ms * MS for token in range(tokens)),
            10,
            tokens,
            cached,
        )
        for index in range(calls)
    ]
    every = [*good, *(Call(0, 1, error="500: no") for _ in range(failed))]
    return report("http://x", Shape("m"), load or Load(calls, 1), summarise(every), every)


def test_ratios_are_of_the_second_over_the_first():
    table = {row.name: row for row in rows(made(10), made(20))}
    for name in ("duration s", "TTFT p50 ms", "ITL p99 ms", "TPOT mean ms", "e2e max ms"):
        assert table[name].ratio == pytest.approx(2.0), name
        assert not table[name].more_is_better
    for name in ("requests/s", "total tokens/s", "output tokens/s"):
        assert table[name].ratio == pytest.approx(0.5), name
        assert table[name].more_is_better
    assert differences(made(10), made(20)) == []


def test_what_the_loads_do_not_share_is_said():
    said = differences(made(10), made(10, calls=7, failed=2, load=Load(9, 4, 1.5), cached=3))
    assert "requests: 20 and 9" in said
    assert "concurrency: 1 and 4" in said
    assert "rate: 0.0 and 1.5" in said
    assert "2 requests of the second failed: 500: no" in said
    assert "21 prompt tokens of the second came from a cache" in said


def test_a_report_survives_its_file(tmp_path):
    write(tmp_path / "a.json", made(10))
    assert read(tmp_path / "a.json") == made(10)
    write(tmp_path / "single.json", made(10, tokens=1))
    again = read(tmp_path / "single.json")
    assert math.isnan(again.summary.tpot_ms.p50)
    assert again.e2e_ms == made(10, tokens=1).e2e_ms


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"{}", b'{"summary": {"itl_ms": null}}', b"[" * 100_000])
def test_what_is_no_report_is_refused_by_name(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ReportError, match=str(path)):
        read(path)
    with pytest.raises(ReportError, match=r"none\.json: No such file"):
        read(tmp_path / "none.json")


def test_the_picture_shows_both_loads_and_stays_in_its_panels():
    drawn = ET.fromstring(picture(made(10), made(40), ("a <b>", "c")))
    lines = [each for each in drawn.iter() if each.tag.endswith("polyline")]
    assert [each.get("stroke") for each in lines] == [*COLOURS] * 4
    for fast, slow in zip(lines[::2], lines[1::2], strict=True):
        points = [[tuple(map(float, pair.split(","))) for pair in each.get("points").split()] for each in (fast, slow)]
        for each in points:
            assert each == sorted(each, key=lambda point: (point[0], -point[1]))
            assert each[-1][0] - each[0][0] <= PANEL_W
            assert each[0][1] - each[-1][1] == pytest.approx(PANEL_H)
        middle = len(points[0]) // 2
        assert points[0][middle][0] < points[1][middle][0]
    assert any(each.text == "a <b>" for each in drawn.iter())


def test_the_command_prints_ratios_and_writes_the_picture(tmp_path):
    for name, step in (("slow", 40), ("fast", 10)):
        write(tmp_path / f"{name}.json", made(step))
    files = [str(tmp_path / f"{name}.json") for name in ("slow", "fast")]
    result = CliRunner().invoke(app, ["compare", *files, "--svg", str(tmp_path / "x.svg")])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if "TTFT p50" in line]
    assert [each.strip() for each in line.strip("│ ").split("│")][1:] == ["40.00", "10.00", "0.25"]
    assert ET.parse(tmp_path / "x.svg")
    broken = CliRunner().invoke(app, ["compare", files[0], str(tmp_path / "no.json")])
    assert broken.exit_code == 2
    assert "no.json: No such file" in broken.stderr


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (b'{"prompt": "a"}\n{"text": "b"}', "line 2"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "x"}]}', "either `prompt` or `messages`"),
        (b'{"prompt": ""}', "line 1: give either"),
        (b"\n\n", "holds no prompt"),
        (b'{"messages": [{"role": "user"}]}', "--endpoint chat"),
    ],
)
def test_a_dataset_is_read_strictly(lines, words):
    with pytest.raises(ValueError, match=words):
        prompts.entries(lines, prompts.Endpoint.COMPLETIONS)


def test_a_dataset_is_sent_as_it_stands_and_begins_again():
    lines = b'{"prompt": "one"}\n\n{"prompt": "two"}\n'
    entries = prompts.entries(lines, prompts.Endpoint.COMPLETIONS)
    sent = [msgspec.json.decode(prompts.body(Shape("m"), index, entries))["prompt"] for index in range(3)]
    assert sent == ["one", "two", "one"]
    chat = prompts.entries(b'{"messages": [{"role": "system", "content": "s"}]}\n' + lines, prompts.Endpoint.CHAT)
    shape = Shape("m", prompts.Endpoint.CHAT, prompts.PromptKind.DATASET)
    sent = [json.loads(prompts.body(shape, index, chat))["messages"] for index in range(2)]
    assert sent == [[{"role": "system", "content": "s"}], [{"role": "user", "content": "one"}]]


def test_a_load_may_be_pinned_to_a_group():
    assert json.loads(prompts.body(Shape("m", group=1), 0))["group"] == 1
    assert "group" not in json.loads(prompts.body(Shape("m"), 0))


def test_the_dataset_options_go_together(tmp_path):
    run = CliRunner().invoke
    assert "needs --dataset" in run(app, ["serve", "--prompt", "dataset"]).stderr
    assert "only read with" in run(app, ["serve", "--dataset", "x"]).stderr
    assert "No such file" in run(app, ["serve", "--prompt", "dataset", "--dataset", str(tmp_path / "x")]).stderr
