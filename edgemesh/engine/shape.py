"""What a model is, as plain numbers: read from a Hugging Face ``config.json``, checked once, sent to every rank.

The dense decoder families differ from Llama in three flags only: a bias on q, k and v (Qwen2), an RMS norm on q and k
(Qwen3), and the size of a head. Anything else is refused here, so that no wrong network is ever built quietly.
"""

import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

Dtype = Literal["float32", "bfloat16"]
Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Heads = Annotated[int, Meta(ge=1, le=4096)]
Layers = Annotated[int, Meta(ge=1, le=1024)]

MAX_CONFIG_BYTES: Final = 1 << 22


class ModelError(ValueError):
    """A model that cannot be served: the message names the file, the field and what would be accepted."""


class Family(enum.StrEnum):
    """The network families that the engine builds."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


class RopeKind(enum.StrEnum):
    """How rotary frequencies are stretched for contexts longer than the ones first trained on."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stretch of the rotary frequencies; ``attention_factor`` 0 means the kind's own rule."""

    kind: RopeKind = RopeKind.DEFAULT
    factor: Annotated[float, Meta(gt=0.0)] = 1.0
    original_max_position: Annotated[int, Meta(ge=0)] = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's sizes and flags; ``dtype`` is the one it is served in.

    ``sliding_window`` 0 means none; otherwise full attention is right only up to that many tokens.
    """

    family: Family
    hidden: Count
    layers: Layers
    heads: Heads
    kv_heads: Heads
    head_dim: Heads
    mlp: Count
    vocab: Count
    rope_theta: Annotated[float, Meta(gt=0.0)]
    rope_scaling: RopeScaling
    norm_eps: Annotated[float, Meta(gt=0.0, lt=1.0)]
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    tie: bool
    max_position: Count
    sliding_window: Annotated[int, Meta(ge=0)]
    dtype: Dtype

    @property
    def context_limit(self) -> int:
        """The longest prompt plus output, in tokens, for which the network is exact."""
        return min(self.max_position, self.sliding_window or self.max_position)


class _FamilyDefaults(msgspec.Struct, frozen=True):
    """What a config of this ``model_type`` means by a key that it leaves out."""

    family: Family
    kv_heads: int | None = None
    head_dim: int | None = None
    max_position: int = 2048
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0


_TYPES: Final[dict[str, _FamilyDefaults]] = {
    "llama": _FamilyDefaults(Family.LLAMA),
    "mistral": _FamilyDefaults(Family.LLAMA, kv_heads=8, max_position=4096 * 32, sliding_window=4096),
    "qwen2": _FamilyDefaults(Family.QWEN2, kv_heads=32, max_position=32768, qkv_bias=True),
    "qwen3": _FamilyDefaults(Family.QWEN3, kv_heads=32, head_dim=128, max_position=32768, qk_norm=True),
}

_REFUSED: Final = {
    "quantization_config": "quantised checkpoints are not served; use the unquantised one or a GGUF file",
    "num_experts": "mixture-of-experts models are not served",
    "num_local_experts": "mixture-of-experts models are not served",
    "auto_map": "models with code of their own are not served",
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ``ModelError`` names the file if it is missing, too large or not an object."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            message = f"{path}: {path.stat().st_size} bytes; a config has at most {MAX_CONFIG_BYTES}"
            raise ModelError(message)
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror}"
        raise ModelError(message) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        message = f"{path}: is not JSON: {error}"
        raise ModelError(message) from error
    if not isinstance(value, dict):
        message = f"{path}: holds {type(value).__name__}; an object is expected"
        raise ModelError(message)
    return value


def read_shape(path: Path, dtype: Dtype = "float32") -> ModelShape:
    """The shape that ``config.json`` states."""
    return parse_shape(read_json(path), dtype, str(path))


def parse_shape(config: Mapping[str, Any], dtype: Dtype = "float32", source: str = "config") -> ModelShape:
    """The shape that a Hugging Face config states; ``ModelError`` for anything the engine would get wrong."""
    defaults = _TYPES.get(kind := str(config.get("model_type")))
    if defaults is None:
        message = f"{source}: model_type: {kind!r} is not served; allowed: {', '.join(_TYPES)}"
        raise ModelError(message)
    for key, why in _REFUSED.items():
        if config.get(key):
            message = f"{source}: {key}: {why}"
            raise ModelError(message)
    _require(config, source, "hidden_act", "silu")
    _require(config, source, "mlp_bias", expected=False)
    _require(config, source, "partial_rotary_factor", 1.0)
    rope = _rope(config, source)
    _require(rope, source, "partial_rotary_factor", 1.0)
    heads = _number(config, source, "num_attention_heads")
    hidden = _number(config, source, "hidden_size")
    bias = bool(config.get("attention_bias", False))
    fields = {
        "family": defaults.family,
        "hidden": hidden,
        "layers": _number(config, source, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": _number(config, source, "num_key_value_heads", defaults.kv_heads or heads),
        "head_dim": _number(config, source, "head_dim", defaults.head_dim or hidden // heads),
        "mlp": _number(config, source, "intermediate_size"),
        "vocab": _number(config, source, "vocab_size"),
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": _rope_scaling(config, rope, defaults, source),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "qkv_bias": defaults.qkv_bias or bias,
        "o_bias": bias and defaults.family is not Family.QWEN2,
        "qk_norm": defaults.qk_norm,
        "tie": bool(config.get("tie_word_embeddings", False)),
        "max_position": _number(config, source, "max_position_embeddings", defaults.max_position),
        "sliding_window": _sliding_window(config, defaults, source),
        "dtype": dtype,
    }
    try:
        shape = msgspec.convert(fields, ModelShape)
    except msgspec.ValidationError as error:
        message = f"{source}: {error}"
        raise ModelError(message) from error
    return _checked(shape, source)


def _checked(shape: ModelShape, source: str) -> ModelShape:
    if shape.heads % shape.kv_heads:
        message = f"{source}: num_attention_heads: {shape.heads} is no multiple of num_key_value_heads {shape.kv_heads}"
        raise ModelError(message)
    if shape.head_dim % 2:
        message = f"{source}: head_dim: {shape.head_dim} is odd; rotary embeddings turn pairs"
        raise ModelError(message)
    return shape


def _number(config: Mapping[str, Any], source: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 24:
        message = f"{source}: {key}: {value!r} is not a whole number from 1 to {1 << 24}"
        raise ModelError(message)
    return value


def _require(config: Mapping[str, Any], source: str, key: str, expected: object) -> None:
    value = config.get(key)
    if value is not None and value != expected:
        message = f"{source}: {key}: {value!r} is not served; allowed: {expected!r}"
        raise ModelError(message)


def _sliding_window(config: Mapping[str, Any], defaults: _FamilyDefaults, source: str) -> Any:  # noqa: ANN401 - checked with the rest
    layers = config.get("layer_types")
    if layers is not None and not isinstance(layers, list):
        message = f"{source}: layer_types: {layers!r} is no list"
        raise ModelError(message)
    if layers is not None:
        used = "sliding_attention" in layers
    else:
        used = bool(config.get("use_sliding_window", defaults.sliding_window > 0))
    return (config.get("sliding_window", defaults.sliding_window) or 0) if used else 0


def _rope(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Rotary settings in one place: newer configs nest them, older ones have them at the top."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        message = f"{source}: rope_parameters: {found!r} is no object"
        raise ModelError(message)
    rope = dict(found)
    if "rope_theta" not in rope and config.get("rope_theta") is not None:
        rope["rope_theta"] = config["rope_theta"]
    return rope


def _rope_scaling(
    config: Mapping[str, Any], rope: Mapping[str, Any], defaults: _FamilyDefaults, source: str
) -> RopeScaling:
    kind = rope.get("rope_type", rope.get("type", "default"))
    allowed = [str(each) for each in RopeKind]
    if kind not in allowed:
        message = f"{source}: rope_type: {kind!r} is not served; allowed: {', '.join(allowed)}"
        raise ModelError(message)
    if kind == RopeKind.DEFAULT:
        return RopeScaling()
    if not rope.get("factor"):
        message = f"{source}: rope_parameters.factor: is missing, and {kind} needs it"
        raise ModelError(message)
    longest = config.get("max_position_embeddings") or defaults.max_position
    fields = {
        "kind": kind,
        "original_max_position": rope.get("original_max_position_embeddings") or longest,
    }
    for key in RopeScaling.__struct_fields__:
        if key not in fields and rope.get(key) is not None:
            fields[key] = rope[key]
    try:
        return msgspec.convert(fields, RopeScaling)
    except msgspec.ValidationError as error:
        message = f"{source}: rope_parameters: {error}"
        raise ModelError(message) from error
