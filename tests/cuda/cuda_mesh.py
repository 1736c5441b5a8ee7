"""A whole mesh over a model of noise, as ``edgemesh start`` runs it, and a client of it."""

import http.client
import json
import os
import subprocess
import sys
import time

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgemesh.bench.launch import free_port
from edgemesh.bench.processes import marked
from edgemesh.runtime.process import RUN_MARK

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "eos_token_id": 0,
}
START_S = 150.0


def save_noise(path):
    """A directory with a config and a tokenizer whose every id is a word."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    # A space, as byte-level tokenizers write it, begins each.
    words = {f"\u0120w{number}": number for number in range(CONFIG["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))


class Mesh:
    """One running mesh."""

    def __init__(self, scratch, model, **overrides):
        self.port = free_port()
        self.log = scratch / "start.log"
        self.runtime = scratch / "r"
        self.runtime.mkdir(mode=0o700)
        settings = {
            "mesh.name": "noise",
            "model.path": str(model),
            "model.weights": "random",
            "model.served_name": "noise",
            "engine.device": "cuda",
            "engine.kv_pages": 64,
            "prefill.chunk_tokens": 512,
            "decode.slots": 16,
            "gateway.port": self.port,
            "trace.dir": str(scratch / "trace"),
        } | {key.replace("__", "."): value for key, value in overrides.items()}
        words = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
        (scratch / "plain.toml").write_text("")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "edgemesh.cli.main", "start", "--topology", str(scratch / "plain.toml"), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"XDG_RUNTIME_DIR": str(self.runtime), "XDG_STATE_HOME": str(scratch / "state")},
            )
        end = time.monotonic() + START_S
        while self.ask("GET", "/health")[0] != 200:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.1)
        (self.run_dir,) = self.runtime.glob("em-*")

    def said(self):
        return self.log.read_text(errors="replace")[-3000:]

    def ask(self, method, path, **fields):
        """Status and JSON of an answer; (0, None) while nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            body = json.dumps({"model": "noise"} | fields) if fields else None
            connection.request(method, path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if answer.status == 200 and fields else text
        except OSError:
            return 0, None
        finally:
            connection.close()

    def complete(self, prompt, tokens, **fields):
        """The text of one completion of exactly so many tokens."""
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} | fields
        status, answer = self.ask("POST", "/v1/completions", **asked)
        assert status == 200, (answer, self.said())
        assert answer["usage"]["completion_tokens"] == tokens
        return answer["choices"][0]["text"]

    def processes(self):
        return marked(RUN_MARK, str(self.run_dir))

    def gone(self, within):
        """Whether every process of the run, and its directory, is gone in time."""
        end = time.monotonic() + within
        while self.processes() or self.run_dir.exists():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def close(self):
        self.process.kill()
        self.process.wait()
        self.gone(10)
