"""Every weight of every rank is the checkpoint's; a broken checkpoint is refused with a message that names what is wrong."""

import json
import math

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from engine_vault_gguf import write_gguf
from engine_vault_models import save_tiny, tiny_model

from edgemesh.engine.checkpoint import open_checkpoint
from edgemesh.engine.gguf_config import config_of
from edgemesh.engine.gguf_file import GgufFile
from edgemesh.engine.layout import Split, targets
from edgemesh.engine.shape import ModelError, RopeKind, parse_shape
from edgemesh.engine.weights import shard_all

FAMILIES = ["llama", "qwen2", "qwen3"]


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return path, save_tiny(request.param, path)


def expected(model, target):
    weights = model.state_dict()
    tensor = torch.zeros(target.shape)
    for run in target.runs:
        tensor.narrow(run.axis, run.at, run.count).copy_(weights[run.source].narrow(run.axis, run.start, run.count))
    return tensor


@pytest.mark.parametrize("split", [Split(), Split(4, 1, 3, 2), Split(3, 2, 8, 7), Split(2, 0, 2, 1)])
def test_every_rank_gets_its_part(saved, split):
    path, model = saved
    shape = open_checkpoint(path).shape
    found = shard_all(path, split)
    for target in targets(shape, split):
        if target.same_as:
            assert found[target.name].data_ptr() == found[target.same_as].data_ptr()
        else:
            assert torch.equal(found[target.name], expected(model, target)), target.name
            assert not target.runs or found[target.name].any(), target.name


def test_a_whole_rank_is_the_model_in_its_own_order(saved):
    path, model = saved
    weights, found = model.state_dict(), shard_all(path, Split())
    layer = "model.layers.1."
    qkv = torch.cat([weights[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(found["layers.1.qkv"], qkv)
    mlp = model.config.intermediate_size
    assert torch.equal(found["layers.1.gate_up"][:mlp], weights[f"{layer}mlp.gate_proj.weight"])
    assert torch.equal(found["layers.1.down"][:, :mlp], weights[f"{layer}mlp.down_proj.weight"])


def test_weights_are_rounded_to_the_served_type(saved):
    path, model = saved
    found = shard_all(path, Split(), "bfloat16")
    assert all(tensor.dtype is torch.bfloat16 for tensor in found.values())
    assert torch.equal(found["norm"], model.state_dict()["model.norm.weight"].bfloat16())


def test_an_index_over_several_files_is_followed(tmp_path):
    model = save_tiny("llama", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = shard_all(tmp_path, Split())
    assert torch.equal(found["norm"], model.state_dict()["model.norm.weight"])


# --- GGUF ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_is_the_same_model(family, tmp_path):
    hf = tmp_path / "hf"
    model = save_tiny(family, hf, attention_bias=False) if family == "qwen3" else save_tiny(family, hf)
    write_gguf(tmp_path / "tiny.gguf", model)
    for split in (Split(), Split(4, 1, 3, 2)):
        ours, theirs = shard_all(tmp_path / "tiny.gguf", split), shard_all(hf, split)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_tensors_are_dequantised_rank_by_rank(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    model = tiny_model("llama", hidden_size=96, intermediate_size=96, head_dim=32, num_attention_heads=6, vocab_size=64)
    write_gguf(tmp_path / "tiny.gguf", model, kind)

    def through(name):
        weight = model.state_dict()[name].numpy()
        return torch.from_numpy(gguf.dequantize(gguf.quantize(weight, kind), kind).copy())

    found = shard_all(tmp_path / "tiny.gguf", Split(3, 1, 4, 2))
    assert torch.equal(found["layers.1.qkv"][:64], through("model.layers.1.self_attn.q_proj.weight")[64:128])
    assert torch.equal(found["layers.1.o"], through("model.layers.1.self_attn.o_proj.weight")[:, 64:128])
    assert torch.equal(found["layers.1.down"], through("model.layers.1.mlp.down_proj.weight")[:, 48:72])
    assert torch.equal(found["embed"], through("model.embed_tokens.weight")[24:48])


def llama3_factors(dim, theta, factor):
    """As llama.cpp's converter bakes Llama 3's stretch into a tensor."""
    factors = []
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0, 5.0])
def test_llama3s_baked_rope_is_recognised_or_refused(factor, tmp_path):
    path = tmp_path / "tiny.gguf"
    model = tiny_model("llama", head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    write_gguf(path, model, tokens=lambda w: w.add_tensor("rope_freqs.weight", llama3_factors(64, 500000.0, factor)))
    if factor == 5.0:
        refused(path, "rope_freqs.weight", "Llama 3")
        return
    rope = open_checkpoint(path).shape.rope_scaling
    assert (rope.kind, rope.factor, rope.original_max_position) == (RopeKind.LLAMA3, factor, 8192)


SIZES = ("embedding_length", "attention.head_count", "attention.key_length", "rope.freq_base", "rope.dimension_count")


@pytest.mark.parametrize("gone", SIZES)
@pytest.mark.parametrize("value", [None, 0, "x", [], [4], 1.5, True])
def test_metadata_of_any_type_is_a_config_or_a_clear_refusal(gone, value, tmp_path):
    path = tmp_path / "tiny.gguf"
    model = tiny_model("llama", head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    write_gguf(path, model, tokens=lambda w: w.add_tensor("rope_freqs.weight", llama3_factors(64, 500000.0, 8.0)))
    with GgufFile(path) as file:
        file.metadata["llama.rope.dimension_count"] = 64
        del file.metadata["llama.attention.key_length"]
        file.metadata[f"llama.{gone}"] = value
        if value is None:
            del file.metadata[f"llama.{gone}"]
        try:
            parse_shape(config_of(file))
        except ModelError as error:
            assert str(error)  # noqa: PT017 - either way is right, another exception is not


def test_yarn_in_a_gguf_is_read(tmp_path):
    path = tmp_path / "tiny.gguf"
    metadata = [
        ("add_rope_scaling_type", gguf.RopeScalingType.YARN),
        ("add_rope_scaling_factor", 4.0),
        ("add_rope_scaling_orig_ctx_len", 32),
    ]
    write_gguf(path, tiny_model("qwen2"), metadata=metadata)
    rope = open_checkpoint(path).shape.rope_scaling
    assert (rope.kind, rope.factor, rope.original_max_position) == (RopeKind.YARN, 4.0, 32)


def test_partial_rotation_in_a_gguf_is_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model("llama"), metadata=[("add_rope_dimension_count", 2)])
    refused(path, "rope.dimension_count: 2 of 4")


# --- what is refused ---------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path):
    save_tiny("llama", tmp_path)
    return tmp_path


def refused(path, *words):
    with pytest.raises(ModelError) as caught:
        shard_all(path, Split())
    for word in words:
        assert word in str(caught.value)


def rewrite(path, change):
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file)


def test_a_missing_tensor_is_named(llama):
    rewrite(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(llama, str(llama), "model.layers.1.mlp.up_proj.weight", "is missing", "[50, 36]")


def test_a_tensor_of_another_shape_is_named(llama):
    rewrite(llama, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(35)}))
    refused(llama, "model.safetensors", "model.norm.weight", "[35]", "[36]")


def test_a_tensor_of_a_quantised_type_is_named(llama):
    rewrite(llama, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(36, dtype=torch.int8)}))
    refused(llama, "model.safetensors", "model.norm.weight", "I8", "BF16")


@pytest.mark.parametrize("keep", [0, 4, 9, 200, 10_000])
def test_a_truncated_file_is_named(llama, keep):
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(llama, "model.safetensors", "no complete safetensors file")


def test_a_file_of_another_kind_is_named(llama):
    (llama / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(1000))
    refused(llama, "model.safetensors", "no complete safetensors file")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_is_never_opened(llama, name):
    (llama / "model.safetensors").rename(llama / name)
    refused(llama, name, "pickle", "safetensors")


def test_an_empty_directory_is_named(tmp_path):
    refused(tmp_path, "config.json")
    save_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, str(tmp_path), ".safetensors")


def test_a_path_that_is_no_model_is_named(tmp_path):
    refused(tmp_path / "none", "none", "neither a model directory nor a .gguf file")


@pytest.mark.parametrize(
    ("index", "word"),
    [
        ({}, "weight_map"),
        ({"weight_map": {"model.norm.weight": "../model.safetensors"}}, "../model.safetensors"),
        ({"weight_map": {"model.norm.weight": "model.bin"}}, "model.bin"),
        ({"weight_map": {"model.norm.weight": 7}}, "7"),
        ({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}, "model-00001-of-00002.safetensors"),
    ],
)
def test_a_bad_index_is_named(llama, index, word):
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(llama, word)


def test_several_files_without_an_index_are_ambiguous(llama):
    (llama / "other.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    refused(llama, "2 safetensors files", "model.safetensors.index.json")


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_model("llama"))
    return path.read_bytes()


@pytest.mark.parametrize("keep", [0, 3, 8, 20, 60, 300, 1000, 20_000, -50])
def test_a_truncated_gguf_is_named(tiny_gguf, tmp_path, keep):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf[:keep])
    refused(path, str(path))


def test_a_gguf_with_flipped_bytes_is_refused_or_read_but_never_crashes(tiny_gguf, tmp_path):
    generator = torch.Generator().manual_seed(1)
    path = tmp_path / "flipped.gguf"
    outcomes = set()
    for _ in range(150):
        data = bytearray(tiny_gguf)
        at, value = torch.randint(0, 1500, (), generator=generator), torch.randint(0, 256, (), generator=generator)
        data[int(at)] = int(value)
        path.write_bytes(data)
        try:
            shard_all(path, Split())
            outcomes.add("read")
        except ModelError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_a_gguf_that_lacks_a_tensor_is_named(tmp_path):
    path = tmp_path / "lacks.gguf"
    write_gguf(path, tiny_model("llama"), skip={"model.layers.0.mlp.down_proj.weight"})
    refused(path, str(path), "blk.0.ffn_down.weight", "is missing")


def test_several_ggufs_in_a_directory_are_ambiguous(tiny_gguf, tmp_path):
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(tiny_gguf)
    refused(tmp_path, "one.gguf, two.gguf")
