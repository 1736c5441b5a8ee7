"""A config is read as transformers reads it, or refused with the field's name."""

import contextlib
import json

import pytest
import transformers
from engine_vault_models import CONFIGS, SHAPES
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.engine.shape import Family, ModelError, RopeKind, parse_shape, read_shape

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}


def config(**changes):
    return {**LLAMA, **changes}


@pytest.mark.parametrize("family", list(SHAPES))
@pytest.mark.parametrize("full", [True, False])
def test_a_saved_config_is_read_as_transformers_reads_it(family, full, tmp_path):
    theirs = CONFIGS[family](**SHAPES[family])
    theirs.to_json_file(tmp_path / "config.json", use_diff=not full)
    ours = read_shape(tmp_path / "config.json", "bfloat16")
    assert (ours.hidden, ours.layers, ours.mlp, ours.vocab) == (
        theirs.hidden_size,
        theirs.num_hidden_layers,
        theirs.intermediate_size,
        theirs.vocab_size,
    )
    assert (ours.heads, ours.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.tie == theirs.tie_word_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.dtype == "bfloat16"
    assert ours.qkv_bias == (family == "qwen2" or getattr(theirs, "attention_bias", False))
    assert ours.qk_norm == (family == "qwen3")
    assert ours.sliding_window == 0


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_a_config_leaves_out_is_the_familys_default(model_type):
    sizes = {**LLAMA, "model_type": model_type, "num_attention_heads": 32, "hidden_size": 256}
    theirs = transformers.AutoConfig.for_model(**sizes)
    ours = parse_shape(sizes)
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_window == (theirs.sliding_window or 0 if model_type == "mistral" else 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ("model_type", "'gpt2'", "llama, mistral, qwen2, qwen3")),
        ({"model_type": None}, ("model_type", "None")),
        ({"num_experts": 8}, ("num_experts", "mixture-of-experts")),
        ({"num_local_experts": 8}, ("num_local_experts",)),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "GGUF")),
        ({"auto_map": {"AutoModel": "x.Y"}}, ("auto_map", "code of their own")),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
        ({"mlp_bias": True}, ("mlp_bias",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor", "0.5")),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("rope_type", "'dynamic'", "yarn")),
        ({"rope_scaling": {"rope_type": "yarn"}}, ("factor", "yarn")),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, ("factor",)),
        ({"num_attention_heads": 0}, ("num_attention_heads", "0")),
        ({"num_attention_heads": 4096, "num_key_value_heads": 3, "head_dim": 8}, ("4096", "num_key_value_heads 3")),
        ({"hidden_size": "64"}, ("hidden_size", "'64'")),
        ({"hidden_size": True}, ("hidden_size", "True")),
        ({"vocab_size": 1 << 30}, ("vocab_size", str(1 << 30))),
        ({"num_hidden_layers": 1 << 20}, ("layers",)),
        ({"num_key_value_heads": 3}, ("num_attention_heads", "4", "3")),
        ({"head_dim": 7}, ("head_dim", "7")),
        ({"rms_norm_eps": 0}, ("norm_eps",)),
        ({"rope_theta": "big"}, ("rope_theta",)),
    ],
)
def test_what_is_not_served_is_named(changes, words):
    with pytest.raises(ModelError) as caught:
        parse_shape(config(**changes), source="/m/config.json")
    for word in ("/m/config.json", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_a_missing_size_is_named(key):
    with pytest.raises(ModelError, match=key):
        parse_shape({name: value for name, value in LLAMA.items() if name != key})


@pytest.mark.parametrize(
    ("text", "words"), [("", "is not JSON"), ("[1]", "list"), ("{", "is not JSON"), ("[" * 100_000, "is not JSON")]
)
def test_a_file_that_is_no_config_is_named(text, words, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=words) as caught:
        read_shape(path)
    assert str(path) in str(caught.value)


def test_a_config_of_megabytes_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"x": "y" * (5 << 20)}))
    with pytest.raises(ModelError, match="at most"):
        read_shape(path)


def test_old_and_new_rope_settings_mean_the_same():
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = parse_shape(config(rope_theta=5e5, rope_scaling={**rope, "original_max_position_embeddings": 8192}))
    new = parse_shape(config(rope_parameters={**rope, "rope_theta": 5e5, "original_max_position_embeddings": 8192}))
    assert old == new
    assert old.rope_scaling.kind is RopeKind.LLAMA3
    assert (old.rope_theta, old.rope_scaling.factor, old.rope_scaling.original_max_position) == (5e5, 8.0, 8192)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"model_type": "mistral", "sliding_window": None, "max_position_embeddings": 32768}, 32768),
        ({"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}, 4096),
        ({"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 2048}, 2048),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 1024}, 32768),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 1024}, 1024),
        ({"model_type": "qwen3", "sliding_window": 64, "layer_types": ["full_attention"] * 2}, 32768),
        ({"model_type": "qwen3", "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, 64),
    ],
)
def test_a_sliding_window_bounds_what_is_exact(changes, limit):
    sizes = {"num_attention_heads": 32, "hidden_size": 256}
    assert parse_shape(config(**{**sizes, **changes})).context_limit == limit


def test_llamas_attention_bias_is_on_all_four_projections():
    shape = parse_shape(config(attention_bias=True))
    assert shape.family is Family.LLAMA
    assert shape.qkv_bias
    assert shape.o_bias


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["rope_type", "factor", "x"]), inner),
    max_leaves=4,
)
KEYS = [
    *("model_type", "hidden_act", "mlp_bias", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim"),
    *("num_hidden_layers", "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    *("rope_parameters", "rope_scaling", "layer_types", "sliding_window", "use_sliding_window", "attention_bias"),
    *("tie_word_embeddings", "partial_rotary_factor", "quantization_config", "num_experts", "auto_map"),
]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), ODD, max_size=3))
def test_a_config_of_any_values_is_a_shape_or_a_clear_refusal(changes):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = {"model_type": "mistral", "num_key_value_heads": 2, "vocab_size": 100} | sizes | changes
    refused = "config.json: "
    with contextlib.suppress(ModelError):
        try:
            assert 1 <= parse_shape(config, source="config.json").context_limit <= 1 << 24
        except ModelError as error:
            refused = str(error)
            raise
    assert refused.startswith("config.json: ")
