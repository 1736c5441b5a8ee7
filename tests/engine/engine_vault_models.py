"""Tiny random models that transformers saves, with awkward shapes; shared by the engine's tests."""

from pathlib import Path

import torch
import transformers

SHAPES = {
    "llama": {
        "hidden_size": 36,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 50,
        "vocab_size": 101,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "head_dim": 4,
    },
    "qwen2": {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 43,
        "vocab_size": 97,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "hidden_size": 36,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 50,
        "vocab_size": 101,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "head_dim": 8,
        "attention_bias": True,
    },
}

CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def tiny_model(family: str, seed: int = 0, **changes: object) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = CONFIGS[family](**{**SHAPES[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases and norms start as constants, which would hide a wrong place
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def save_tiny(family: str, path: Path, max_shard_size: str = "5GB", **changes: object) -> transformers.PreTrainedModel:
    model = tiny_model(family, **changes)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model
