"""How many pages there are, and how long a request may be."""

import pytest

from edgemesh.engine.capacity import PROCESS_BYTES, _cgroup_left, free_memory, kv_budget, page_bytes
from edgemesh.engine.shape import ModelError, parse_shape
from edgemesh.topology import parse

SHAPE = parse_shape(
    {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
    },
    "bfloat16",
)
GIB = 1 << 30


def topology(toml=""):
    return parse("[mesh]\ntp = 2\ndp = 1\nsplit = false\n[engine]\npage_tokens = 16\n" + toml)


def test_a_page_is_keys_and_values_of_all_layers_of_a_ranks_heads():
    assert page_bytes(SHAPE, 1, 16) == 30 * 2 * 16 * 3 * 64 * 2
    assert page_bytes(SHAPE, 2, 16) == 30 * 2 * 16 * 2 * 64 * 2


def test_stated_pages_are_taken_and_bound_the_length():
    kv = kv_budget(topology("kv_pages = 65"), SHAPE, 2, 0)
    assert (kv.pages, kv.page_tokens, kv.max_model_len) == (65, 16, 1024)


def test_pages_come_from_free_memory_less_what_processes_take():
    kv = kv_budget(topology("memory_fraction = 0.5"), SHAPE, 2, 4 * GIB)
    assert kv.pages == (2 * GIB - 2 * PROCESS_BYTES) // (2 * page_bytes(SHAPE, 2, 16))
    assert kv.max_model_len == 8192


def test_no_more_memory_is_taken_than_is_of_use():
    kv = kv_budget(topology("[decode]\nslots = 8"), SHAPE, 2, 1 << 50)
    assert kv.pages == (4 * 8192 + 8 * 512) // 16 + 1


def test_a_short_memory_shortens_requests():
    free = int((2 * PROCESS_BYTES + 2 * 33 * page_bytes(SHAPE, 2, 16)) / 0.5) + 1
    kv = kv_budget(topology("memory_fraction = 0.5"), SHAPE, 2, free)
    assert (kv.pages, kv.max_model_len) == (33, 512)


def test_a_stated_length_is_kept_or_refused():
    assert kv_budget(topology("[model]\nmax_model_len = 100"), SHAPE, 2, 8 * GIB).max_model_len == 100
    free = int((2 * PROCESS_BYTES + 2 * 33 * page_bytes(SHAPE, 2, 16)) / 0.9) + 1
    with pytest.raises(ModelError, match=r"holds 512 tokens, and one request of 4096 needs .* MiB"):
        kv_budget(topology("[model]\nmax_model_len = 4096"), SHAPE, 2, free)
    with pytest.raises(ModelError, match=r"max_model_len: 9000 is more than the model's 8192 positions"):
        kv_budget(topology("[model]\nmax_model_len = 9000"), SHAPE, 2, 8 * GIB)


def test_no_memory_at_all_is_refused_with_the_keys_to_change():
    with pytest.raises(ModelError, match=r"engine\.kv_pages or engine\.memory_fraction"):
        kv_budget(topology(), SHAPE, 2, PROCESS_BYTES)


def test_a_control_groups_limit_counts(tmp_path):
    assert free_memory() > 0
    assert _cgroup_left(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert _cgroup_left(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert _cgroup_left(tmp_path) == 900
