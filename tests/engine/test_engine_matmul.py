import pytest
import torch
from torch.nn import functional

from edgemesh.engine.matmul import gated_mlp, linear, logits

ROWS = (0, 1, 2, 3, 4, 32, 33, 64, 65)
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def random(seed, *shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found, wanted, dtype):
    assert found.shape == wanted.shape
    assert found.dtype == dtype
    if wanted.numel():
        assert (found.double() - wanted).norm() / wanted.norm() < LIMIT[dtype]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", list(LIMIT))
def test_products_for_any_number_of_rows(rows, dtype):
    x, weight = random(1, rows, 72, dtype=dtype), random(2, 40, 72, dtype=dtype)
    bias, down = random(3, 40, dtype=dtype), random(4, 72, 20, dtype=dtype)
    wanted = x.double() @ weight.double().T
    with torch.inference_mode():
        assert linear(x, weight).is_contiguous()
        close(linear(x, weight), wanted, dtype)
        close(linear(x, weight, bias), wanted + bias.double(), dtype)
        close(logits(x, weight), wanted, dtype)
        gate, up = wanted.chunk(2, dim=-1)
        close(gated_mlp(x, weight, down), (functional.silu(gate) * up) @ down.double().T, dtype)


def test_a_shard_without_vocabulary_has_no_logits():
    for dtype in LIMIT:
        assert logits(torch.ones(3, 8, dtype=dtype), torch.empty(0, 8, dtype=dtype)).shape == (3, 0)
