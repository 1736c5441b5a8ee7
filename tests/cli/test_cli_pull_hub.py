"""A real hub client against a hub of our own: pulled files are found again offline, and load."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_vault_models import save_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PULL = "import sys, typer; from edgemesh.cli.pull import pull; sys.argv[0] = 'pull'; typer.run(pull)"
LOAD = """
import sys
from edgemesh.engine.layout import Split
from edgemesh.engine.locate import locate
from edgemesh.engine.weights import shard_all
directory = locate("someone/tiny")
print(sorted(path.name for path in directory.iterdir()), len(shard_all(directory, Split())))
"""
START = """
from rich.console import Console
from edgemesh.cli.start import prepare
from edgemesh.topology import parse
topology = prepare(parse("", ["model.path=someone/tiny", "gateway.port=0"]), Console(stderr=True))
print(topology.model.served_name, topology.model.path)
"""


class Hub(ThreadingHTTPServer):
    """The few calls that a snapshot download makes."""

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.fetched = files, []


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        path = urlsplit(self.path).path
        if path.startswith("/api/models/someone/tiny/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.server.files.items()
            ]
            self.reply(json.dumps(tree).encode(), body)
        elif path.startswith("/api/models/someone/tiny"):
            files = [{"rfilename": name} for name in self.server.files]
            self.reply(json.dumps({"id": "someone/tiny", "sha": COMMIT, "siblings": files}).encode(), body)
        elif path.startswith("/someone/tiny/resolve/") and (name := path.rsplit("/", 1)[1]) in self.server.files:
            if body:
                self.server.fetched.append(name)
            self.reply(self.server.files[name], body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def reply(self, data, body):
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    save_tiny("qwen3", tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    server = Hub(files | {"pytorch_model.bin": b"\x80evil", "modeling_x.py": b"evil()", "tokenizer.json": b"{}"})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(code, tmp_path, *arguments, **environment):
    base = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    base |= {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    base |= {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=base | environment, capture_output=True, text=True, check=False)


def test_a_pulled_hub_model_is_found_offline_and_loads(hub, tmp_path):
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    done = run(PULL, tmp_path, "someone/tiny", HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    wanted = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    assert set(hub.fetched) == wanted
    done = run(LOAD, tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(sorted(wanted)))


def test_a_model_that_the_hub_does_not_have_is_an_error_without_a_stack(hub, tmp_path):
    done = run(PULL, tmp_path, "someone/else", HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}")
    assert done.returncode == 1
    assert "error: someone/else could not be downloaded" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_start_pulls_a_hub_model_that_is_not_here_and_only_then(hub, tmp_path):
    endpoint = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "XDG_STATE_HOME": str(tmp_path / "state")}
    done = run(START, tmp_path, **endpoint)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny ")
    assert "model.safetensors" in hub.fetched
    hub.files, hub.fetched = {}, []
    again = run(START, tmp_path, **endpoint)
    assert (again.stdout, hub.fetched) == (done.stdout, [])
