import itertools
import re
from html.parser import HTMLParser

import pytest
from synthetic_trace import TraceWriter, two_groups

from edgemesh.inspect import page, queries
from edgemesh.inspect.store import open_trace
from edgemesh.inspect.timeline import TickIndex, build


class Reader(HTMLParser):
    """The elements of a page, and whether each one that opens also closes."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        if tag not in {"meta", "line"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def rendered(directory, request):
    with open_trace(directory) as trace:
        return page.render(queries.timelines(trace, [request])[0])


def test_boxes_cover_the_whole_time_once(tmp_path):
    two_groups(tmp_path)
    found = read(rendered(tmp_path, "req-slow"))
    boxes = [each for each in found.attributes if "fill" in each and each.get("y") == "34"]
    edges = [(float(box["x"]), float(box["x"]) + float(box["width"])) for box in boxes]
    assert edges[0][0] == 150
    assert edges[-1][1] == pytest.approx(1150, abs=0.1)
    for (_, end), (start, _) in itertools.pairwise(edges):
        assert start == pytest.approx(end, abs=0.1)
    words = " ".join(found.texts)
    for expected in (
        "decode barrier: 20.0 ms from 111 ms",
        "53.0 ms: 3 ticks, 43% of it waiting",
        "waited for group 0",
        "req-neighbour",
        "end to end 158 ms",
    ):
        assert expected in words


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", '"><img src=x onerror=y>', "a&b'c", "\x00\x1b]0;t\x07"]
)
def test_a_hostile_id_stays_text_and_nothing_is_fetched(tmp_path, hostile):
    to = two_groups(tmp_path, request="victim", neighbour=hostile)
    to.event("gateway-0", "request.failed", 300, request="v2", code=hostile, reason=hostile)
    pages = [rendered(tmp_path, "victim"), rendered(tmp_path, "v2")]
    if "\x00" not in hostile:  # a line with that is no event
        pages.append(rendered(tmp_path, hostile))
    for text in pages:
        found = read(text)
        assert "script" not in found.tags
        assert "img" not in found.tags
        assert not any({"src", "href", "onerror", "onload"} & each.keys() for each in found.attributes)
        assert not re.search(r"https?://|url\(|@import", text)
        assert "\x1b" not in text


def test_a_request_of_one_moment_and_one_of_many_spans_are_drawn(tmp_path):
    to = TraceWriter(tmp_path)
    to.event("gateway-0", "request.failed", 0, request="at-once", status=400)
    assert "failed (400)" in rendered(tmp_path, "at-once")
    for number in range(500):
        to.event("group-0", "request.preempted", number * 2, request="restless")
        to.event("group-0", "request.admitted", number * 2 + 1, request="restless")
    text = rendered(tmp_path, "restless")
    assert "(shorter ones)" in read(text).texts
    assert len(text) < 1 << 20


def test_any_length_gets_a_few_marks_on_its_axis():
    from edgemesh.inspect.facts import Event

    for ns in (1, 7, 10, 99, 100, 12_345, 10**9, 3 * 10**12, 10**15):
        happened = [Event(0, "gateway-0", "request.received"), Event(ns, "gateway-0", "request.finished")]
        text = page.render(build("r", happened, TickIndex([])))
        assert 2 <= text.count("<line") <= 12, ns
