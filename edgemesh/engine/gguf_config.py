"""The Hugging Face ``config.json`` that the metadata of a GGUF file amounts to."""

import math
from typing import Any, Final

from edgemesh.engine.gguf_file import GgufFile
from edgemesh.engine.shape import ModelError

ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_SIZES: Final = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
}


def config_of(file: GgufFile) -> dict[str, Any]:
    """A config that ``parse_shape`` and transformers read; ``ModelError`` for what is not served, or makes no sense."""
    try:
        return _config_of(file)
    except (LookupError, TypeError, ArithmeticError) as error:  # values of other types than the format says
        message = f"{file.path}: its metadata makes no sense: {type(error).__name__}: {error}"
        raise ModelError(message) from error


def _config_of(file: GgufFile) -> dict[str, Any]:
    meta = file.metadata
    kind = meta.get("general.architecture")
    if kind not in ARCHITECTURES:
        message = f"{file.path}: general.architecture: {kind!r} is not served; allowed: {', '.join(ARCHITECTURES)}"
        raise ModelError(message)
    config: dict[str, Any] = {"model_type": kind, "architectures": [ARCHITECTURES[kind]], "hidden_act": "silu"}
    config |= {key: meta[f"{kind}.{name}"] for key, name in _SIZES.items() if f"{kind}.{name}" in meta}
    if isinstance(config.get("intermediate_size"), list) or isinstance(config.get("num_attention_heads"), list):
        message = f"{file.path}: layers of different sizes are not served"
        raise ModelError(message)
    rotary = meta.get(f"{kind}.rope.dimension_count")
    if "head_dim" not in config and rotary is not None:
        config["head_dim"] = rotary
    if "head_dim" not in config:
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
            message = f"{file.path}: {kind}.embedding_length and {kind}.attention.head_count: {hidden!r} and {heads!r} are no sizes"
            raise ModelError(message)
        config["head_dim"] = hidden // heads
    if rotary is not None and rotary != config["head_dim"]:
        message = f"{file.path}: {kind}.rope.dimension_count: {rotary} of {config['head_dim']}; partial rotation is not served"
        raise ModelError(message)
    embedding = file.tensors.get("token_embd.weight")
    config["vocab_size"] = embedding.shape[0] if embedding else meta.get(f"{kind}.vocab_size")
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = kind == "llama" and "blk.0.attn_q.bias" in file.tensors
    config["rope_parameters"] = _rope(file, kind, config)
    config["dtype"] = "float32"
    for key in ("bos", "eos"):
        if (token := meta.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{key}_token_id"] = token
    return config


def _rope(file: GgufFile, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    meta = file.metadata
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": meta.get(f"{kind}.rope.freq_base", 10000.0)}
    scaling = meta.get(f"{kind}.rope.scaling.type", "none")
    if scaling in {"linear", "yarn"}:
        rope["rope_type"] = scaling
        rope["factor"] = meta.get(f"{kind}.rope.scaling.factor")
        original = meta.get(f"{kind}.rope.scaling.original_context_length")
        if original is not None:
            rope["original_max_position_embeddings"] = original
    elif scaling != "none":
        message = f"{file.path}: {kind}.rope.scaling.type: {scaling!r} is not served; allowed: none, linear, yarn"
        raise ModelError(message)
    if "rope_freqs.weight" in file.tensors:
        rope |= _llama3(file, config["head_dim"], rope["rope_theta"])
    return rope


def _llama3(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's stretch is baked into a tensor of factors: find the published parameters that give it."""
    info = file.tensors["rope_freqs.weight"]
    found = memoryview(file.data[info.start : info.start + info.nbytes]).cast("f").tolist()
    for factor in (8.0, 32.0):
        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        factors = [_stretch(theta ** (-2 * pair / head_dim), factor) for pair in range(head_dim // 2)]
        if len(factors) == len(found) and all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-3), factors, found)):
            return rope
    message = f"{file.path}: rope_freqs.weight: is none of the known Llama 3 scalings (factor 8 or 32)"
    raise ModelError(message)


def _stretch(frequency: float, factor: float) -> float:
    """By how much a rotary frequency is divided (low factor 1, high factor 4, 8,192 positions originally)."""
    turns = 8192 * frequency / (2 * math.pi)
    if turns < 1.0:
        return factor
    if turns > 4.0:
        return 1.0
    smooth = (turns - 1.0) / 3.0
    return 1.0 / ((1.0 - smooth) / factor + smooth)
