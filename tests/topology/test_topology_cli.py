import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgemesh.cli.topology import app
from edgemesh.topology import shipped_names

CONFIG = {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25600,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def call(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("name", shipped_names())
def test_check_proves_every_shipped_file(name):
    result = call("check", name)
    assert result.exit_code == 0, result.output
    assert "no link with request or step data reaches two groups" in result.output


def test_check_says_what_is_wrong_on_stderr_and_fails(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("[mesh]\ntpp = 2\n")
    result = call("check", str(file))
    assert result.exit_code == 2
    assert "did you mean 'mesh.tp'" in result.stderr
    assert "Traceback" not in result.output


def test_check_takes_overrides():
    assert "8 groups of 1 rank" in call("check", "demo", "--set", "mesh.tp=8", "--set", "mesh.dp=8").output


def test_check_tells_the_budget_of_a_card(model):
    result = call("check", "tp8-dp2", "--model", str(model))
    assert result.exit_code == 0, result.output
    assert "10.1 GB of weights" in result.output
    refused = call("check", "tp8-dp2", "--model", str(model), "--card-gb", "8")
    assert refused.exit_code == 1
    assert "does not fit cards of 8 GiB" in refused.stderr


def test_check_says_why_there_is_no_budget():
    assert "no memory budget: the config.json of model.path = 'Qwen/" in call("check", "tp8-dp2").output
    assert "no memory budget" not in call("check", "demo").output


def test_check_can_ask_the_machine(tmp_path):
    missing = str(tmp_path / "nothing")
    result = call("check", "demo", "--machine", "--set", f"model.path={missing}", "--set", "gateway.port=0")
    assert result.exit_code == 1
    assert f"model.path = '{missing}' does not exist" in result.stderr


def test_show_lists_actors_and_links_with_scopes_and_unions():
    output = call("show", "tp8-dp2").output
    for words in ("group(1)", "placed(0)", "Plan IdlePlan", "rank-4.decode", "barrier-0", "control", "egress"):
        assert words in output


def test_show_between_hosts_prints_endpoints():
    hosts = ["--set", 'mesh.hosts=["10.0.0.1", "10.0.0.2"]', "--set", "mesh.keys_dir=keys"]
    assert "tcp://10.0.0.2:7700" in call("show", "tp8-dp2", *hosts).output


def test_show_draws(tmp_path):
    file = tmp_path / "mesh.svg"
    result = call("show", "demo", "--svg", str(file), "--mermaid")
    assert result.exit_code == 0
    assert file.read_text().startswith("<svg")
    assert "flowchart LR" in result.output


def test_schema_is_what_lies_in_the_repository():
    committed = Path(__file__).resolve().parents[2] / "schemas" / "topology.json"
    assert call("schema").output == committed.read_text()


def test_schema_writes_every_file(tmp_path):
    assert call("schema", "--write", str(tmp_path)).exit_code == 0
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")}
    assert {"topology.json", "messages.json", "inbox/group.json"} <= written
