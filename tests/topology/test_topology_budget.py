import json

import msgspec
import pytest

from edgemesh.topology import Engine, MeshShape, Model, Topology, TopologyError, load, resolve
from edgemesh.topology.budget import ModelNumbers, budget, check_budget, read_numbers

CARD = 24 << 30
QWEN3_32B = ModelNumbers(
    hidden_size=5120,
    num_hidden_layers=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=25600,
    vocab_size=151936,
    max_position_embeddings=40960,
)
QWEN3_8B = ModelNumbers(
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    max_position_embeddings=40960,
)


def cuda(tp, dp, attn_tp=0, **engine):
    engine = Engine(device="cuda", memory_fraction=0.95, **engine)
    return resolve(Topology(mesh=MeshShape(tp=tp, dp=dp, attn_tp=attn_tp), engine=engine))


def test_qwen3_32b_on_eight_cards_of_24_gb():
    two = check_budget(cuda(8, 2), QWEN3_32B, CARD)
    assert two.weights_bytes / 1e9 == pytest.approx(10.1, abs=0.05)
    assert 2 * two.kv_tokens == pytest.approx(387_000, rel=0.05)
    eight = budget(cuda(8, 8), QWEN3_32B, CARD)
    assert eight.weights_bytes / 1e9 == pytest.approx(21.5, abs=0.05)
    assert eight.full_requests < 0.2


def test_what_does_not_fit_is_refused_with_the_nearest_shape_that_does():
    with pytest.raises(TopologyError, match=r"tp = 8, dp = 2, attn_tp = 4 \(attention DP\)"):
        check_budget(cuda(8, 8), QWEN3_32B, CARD)


def test_more_cards_are_advised_when_as_many_do_not_suffice():
    with pytest.raises(TopologyError, match=r"On 4 cards this fits: tp = 4, dp = 1"):
        check_budget(cuda(2, 1), QWEN3_32B, CARD)


def test_a_shorter_context_is_advised_when_it_would_help_and_then_fits():
    topology = cuda(1, 1)
    with pytest.raises(TopologyError, match=r"set model.max_model_len to (\d+) or less") as caught:
        check_budget(topology, QWEN3_8B, CARD)
    limit = int(str(caught.value).rpartition(" to ")[2].split()[0])
    shorter = msgspec.structs.replace(topology, model=Model(max_model_len=limit))
    assert check_budget(shorter, QWEN3_8B, CARD).full_requests >= 2


def test_no_number_of_cards_helps_a_card_that_is_too_small_for_its_contexts():
    with pytest.raises(TopologyError, match="No topology of up to 64 such cards fits"):
        check_budget(cuda(8, 1), QWEN3_32B, 1 << 30)


def test_the_advice_is_always_itself_accepted():
    for tp, dp, attn_tp in [(8, 8, 0), (2, 1, 0), (1, 1, 0), (4, 4, 0), (2, 4, 2), (3, 3, 0)]:
        try:
            check_budget(cuda(tp, dp, attn_tp), QWEN3_32B, CARD)
        except TopologyError as error:
            numbers = str(error).partition("this fits: ")[2].partition(" (")[0]
            shape = {key: int(value) for key, value in (part.split(" = ") for part in numbers.split(", "))}
            assert check_budget(cuda(**shape), QWEN3_32B, CARD).full_requests >= 2


def test_kv_heads_are_copied_when_ranks_outnumber_them_and_stated_pages_cap_the_tokens():
    assert budget(cuda(16, 1), QWEN3_8B, CARD).kv_bytes_per_token == 2 * 36 * 128 * 2
    assert budget(cuda(2, 1, kv_pages=11), QWEN3_8B, CARD).kv_tokens == 10 * 256


def test_numbers_are_read_from_config_json_and_its_faults_are_named(tmp_path):
    with pytest.raises(TopologyError, match="cannot read"):
        read_numbers(tmp_path)
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(TopologyError, match="hidden_size"):
        read_numbers(tmp_path)
    numbers = msgspec.to_builtins(QWEN3_8B) | {"architectures": ["Qwen3ForCausalLM"]}
    config.write_text(json.dumps(numbers | {"num_hidden_layers": 0}))
    with pytest.raises(TopologyError, match="num_hidden_layers"):
        read_numbers(tmp_path)
    for kv_heads in (QWEN3_8B.num_attention_heads + 1, 2 * QWEN3_8B.num_attention_heads, 5):
        config.write_text(json.dumps(numbers | {"num_key_value_heads": kv_heads}))
        with pytest.raises(TopologyError, match=f"no multiple of num_key_value_heads = {kv_heads}"):
            read_numbers(tmp_path)
    config.write_text(json.dumps(numbers))
    assert read_numbers(tmp_path) == QWEN3_8B


@pytest.mark.parametrize(
    ("name", "model"),
    [("tp8-dp2", QWEN3_32B), ("tp8", QWEN3_32B), ("tp1", QWEN3_8B)],
)
def test_shipped_files_fit_the_cards_they_are_for(name, model):
    assert check_budget(load(name), model, CARD).full_requests >= 2
