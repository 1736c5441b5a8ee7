from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from topology_strategies import topologies

from edgemesh.topology import Gateway, MeshShape, Topology, derive, load
from edgemesh.topology.draw import headline, mermaid, svg
from edgemesh.wire.ids import Role

SVG = "{http://www.w3.org/2000/svg}"


@given(topologies())
@settings(max_examples=60, deadline=None)
def test_the_picture_is_well_formed_holds_every_actor_and_stays_inside_its_frame(topology):
    mesh = derive(topology, "/run/edgemesh")
    root = ET.fromstring(svg(mesh))
    words = " ".join(text.text or "" for text in root.iter(f"{SVG}text"))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    for actor in mesh.actors:
        if actor.role is Role.RANK:
            assert f"{actor.name} on host {actor.host}" in titles
        else:
            assert actor.name in words
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in root.iter(f"{SVG}rect"):
        assert 0 <= float(box.get("x", 0)) <= float(box.get("x", 0)) + float(box.get("width", 0)) <= width
        assert 0 <= float(box.get("y", 0)) <= float(box.get("y", 0)) + float(box.get("height", 0)) <= height


def test_boxes_of_groups_do_not_overlap():
    mesh = derive(Topology(mesh=MeshShape(tp=8, dp=4), gateway=Gateway(processes=3)), "/run/edgemesh")
    root = ET.fromstring(svg(mesh))
    groups = [box for box in root.iter(f"{SVG}rect") if box.get("rx") == "10"]
    assert len(groups) == 4
    spans = sorted((float(box.get("y", 0)), float(box.get("y", 0)) + float(box.get("height", 0))) for box in groups)
    assert all(end < start for (_, end), (start, _) in pairwise(spans))


def test_mermaid_has_one_box_per_group_and_ticks_only_where_groups_step_together():
    coupled = mermaid(derive(Topology(mesh=MeshShape(tp=8, dp=2)), "/run/edgemesh"))
    assert coupled.count("subgraph") == coupled.count("  end") == 2
    assert "prefill: ranks 0-3" in coupled
    assert "decode: ranks 4-7" in coupled
    assert coupled.count("ticks") == 2
    plain = mermaid(derive(Topology(mesh=MeshShape(tp=1, dp=2, attn_tp=1, split=False)), "/run/edgemesh"))
    assert "mixed: rank 1" in plain
    assert "ticks" not in plain


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (MeshShape(), "plain TP: 1 group of 1 rank, prefill and decode planes, 1 host"),
        (MeshShape(tp=8, dp=2), "attention DP: 2 groups of 4 ranks"),
        (MeshShape(tp=2, dp=2, attn_tp=2, split=False), "plain DP: 2 groups of 2 ranks, one plane"),
    ],
)
def test_the_headline_says_what_it_is(shape, words):
    assert words in headline(derive(Topology(mesh=shape), "/run/edgemesh"))


def test_the_picture_beside_the_shipped_file_is_the_one_that_the_command_draws():
    drawn = svg(derive(load("tp8-dp2"), "/run/edgemesh"))
    picture = Path(__file__).parents[2] / "topology" / "tp8-dp2.svg"
    assert picture.read_text(encoding="utf-8") == drawn, "edgemesh topology show tp8-dp2 --svg topology/tp8-dp2.svg"
