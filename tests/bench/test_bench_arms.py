"""Specs of comparisons: read strictly, those that ship are legal, and the tables show ratios to the first arm."""

from pathlib import Path

import pytest

from edgemesh.bench import arms
from edgemesh.bench.arms import Outcome, Share, SpecError, overrides_of, parse, tables
from edgemesh.bench.launch import _toml
from edgemesh.bench.statistics import Call, summarise
from edgemesh.topology import derive, load

SPECS = sorted((Path(arms.__file__).parent / "specs").glob("*.toml"))
LEAST = """
title = "t"
[[arms]]
name = "a"
topology = "tp1"
[[loads]]
name = "l"
concurrency = 1
requests = 1
input_len = 1
output_len = 1
"""


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_arm_of_a_shipped_spec_is_a_legal_mesh(path):
    spec = parse(path.read_text())
    worlds = set()
    for arm in spec.arms:
        overrides = overrides_of(spec, arm, "/model" if spec.model else "")
        topology = load(arm.topology, [f"{key}={_toml(value)}" for key, value in overrides.items()])
        derive(topology, "/run")
        worlds.add(topology.world)
        assert max(each.concurrency for each in spec.loads if not each.rate) <= topology.decode.slots * topology.mesh.dp
    assert len(worlds) == 1, "all arms use the same cards"
    assert f"specs/{path.name}" in path.read_text(), "the file says how it is run"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("title", "titel", "titel: no such key; did you mean 'title'?"),
        ("topology", "topologie", "arms[0].topologie: no such key; did you mean 'topology'?"),
        ('topology = "tp1"', "", "arm 'a': give either `topology`"),
        ('topology = "tp1"', 'topology = "tp1"\nurl = "http://x"', "arm 'a': give either `topology`"),
        ('topology = "tp1"', 'url = "http://x"\nset = {"mesh.tp" = 2}', "arm 'a': `set` is for a mesh"),
        ("requests = 1", "requests = 0", "requests"),
        ('name = "a"', 'name = "../a"', "name"),
        ("[[loads]]", '[[arms]]\nname = "a"\ntopology = "tp1"\n[[loads]]', "arms: the name 'a' is there twice"),
        ("title", "= title", "not TOML"),
    ],
)
def test_a_spec_that_is_wrong_is_refused_by_the_key(old, new, words):
    assert parse(LEAST).arms[0].name == "a"
    with pytest.raises(SpecError) as refused:
        parse(LEAST.replace(old, new, 1))
    assert words in str(refused.value)


def test_what_an_arm_sets_is_over_what_the_spec_sets():
    spec = parse(LEAST.replace("[[arms]]", '[set]\n"mesh.tp" = 2\n"decode.slots" = 4\n[[arms]]\nset = {"mesh.tp" = 4}'))
    assert overrides_of(spec, spec.arms[0], "") == {"mesh.tp": 4, "decode.slots": 4}
    shaped = overrides_of(spec, spec.arms[0], "/m")
    assert (shaped["model.path"], shaped["model.weights"]) == ("/m", "random")


def outcome(name, ms, shares=()):
    calls = [Call(0, 3 * ms * 1_000_000, (ms * 1_000_000, 2 * ms * 1_000_000, 3 * ms * 1_000_000), 10, 3)]
    return Outcome(name, "l", summarise(calls), [3, 4] if shares else [], list(shares))


def test_the_tables_show_ratios_to_the_first_arm():
    text = tables(parse(LEAST), [outcome("a", 10), outcome("b", 20, [Share("decode", 7, 1.5, 0.25, 0.5)])])
    (first,) = [line for line in text.splitlines() if line.startswith("| a |")]
    second, planes = [line for line in text.splitlines() if line.startswith("| b |")]
    assert "(" not in first
    assert "20.0 (2.00)" in second
    assert "(0.50)" in second
    assert [each.strip() for each in planes.strip("|").split("|")] == [
        "b", "l", "decode", "7", "1.50", "25.0%", "50.0%", "3, 4",
    ]  # fmt: skip
