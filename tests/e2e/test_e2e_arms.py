"""Meshes compared side by side, as a user would compare them."""

import json
import subprocess
import sys

SPEC = """
title = "nothing but messages"
[set]
"engine.kind" = "null"
"engine.kv_pages" = 256
[[arms]]
name = "one"
topology = "tp1-cpu"
[[arms]]
name = "two"
topology = "tp1-cpu"
set = { "mesh.dp" = 2, "mesh.tp" = 2 }
[[loads]]
name = "small"
concurrency = 4
requests = 12
input_len = 40
output_len = 20
"""


def bench(*words):
    command = [sys.executable, "-m", "edgemesh.cli.main", "bench", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def test_arms_are_started_driven_and_compared(tmp_path):
    spec, out = tmp_path / "spec.toml", tmp_path / "out"
    spec.write_text(SPEC)
    done = bench("arms", spec, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "tables.md").read_text().strip() in done.stdout
    outcomes = {each["arm"]: each for each in json.loads((out / "outcomes.json").read_bytes())}
    for arm, groups in (("one", 1), ("two", 2)):
        assert outcomes[arm]["summary"]["requests"] == 12
        assert outcomes[arm]["summary"]["output_tokens"] == 240
        assert len(outcomes[arm]["tokens_of_groups"]) == groups
        # A request's first token comes from its prompt's step, the others are decode rows of their own.
        assert 12 * (40 + 19) <= sum(outcomes[arm]["tokens_of_groups"]) <= 12 * (40 + 20)
        assert [share["plane"] for share in outcomes[arm]["shares"]] == ["decode", "prefill"]
        assert all(share["steps"] > 0 and share["step_ms"] >= 0 for share in outcomes[arm]["shares"])
    compared = bench("compare", out / "one-small.json", out / "two-small.json", "--svg", out / "x.svg")
    assert compared.returncode == 0, compared.stderr
    assert "total tokens/s" in compared.stdout
    assert (out / "x.svg").read_text().startswith("<svg")


def test_an_arm_that_cannot_start_is_named(tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC.replace('"tp1-cpu"\nset = {', '"tp1-cpu"\nset = { "mesh.tpp" = 1,'))
    done = bench("arms", tmp_path / "spec.toml", "--out", tmp_path)
    assert done.returncode == 1
    assert "did you mean 'mesh.tp'" in done.stderr
    assert "Traceback" not in done.stderr
    assert "| one |" in done.stdout, "what was measured before is shown"
    assert "mesh.tpp" in (tmp_path / "two.log").read_text()
