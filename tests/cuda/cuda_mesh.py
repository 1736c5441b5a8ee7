"""A whole mesh over a model of noise, as ``edgemesh start`` runs it, and a client of it."""

import http.client
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgemesh.bench.launch import Launched

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
START_S = 100.0


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


class Mesh(Launched):
    """One running mesh that serves."""

    def __init__(self, scratch, model, **overrides):
        settings = {
            "mesh.name": "noise",
            "model.path": str(model),
            "model.weights": "random",
            "model.served_name": "noise",
            "engine.device": "cuda",
            "engine.kv_pages": 64,
            "prefill.chunk_tokens": 512,
            "decode.slots": 16,
        } | {key.replace("__", "."): value for key, value in overrides.items()}
        (scratch / "plain.toml").write_text("")
        super().__init__(str(scratch / "plain.toml"), settings)
        try:
            self.wait_healthy(START_S)
        except BaseException:
            self.close()
            raise

    def complete(self, prompt, tokens, **fields):
        """The text of one completion of exactly so many tokens."""
        asked = {
            "model": "noise",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        } | fields
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        assert answer.status == 200, self.tell(text.decode(errors="replace"))
        found = json.loads(text)
        assert found["usage"]["completion_tokens"] == tokens
        return found["choices"][0]["text"]
