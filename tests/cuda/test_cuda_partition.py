import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import triton
import triton.language as tl

from edgemesh.engine.cuda.partition import part_of
from edgemesh.engine.cuda.proof import prove_products

DEVICE = torch.device("cuda", 0)


@triton.jit
def where(out):
    processor = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    # Long enough that no multiprocessor runs all of it alone.
    total = 0.0
    for step in range(3000):
        total += tl.sqrt(total + step)
    tl.store(out + tl.program_id(0), processor + (total < 0).to(tl.int32))


@pytest.mark.parametrize("percent", [25, 60, 80, 100])
def test_work_on_the_stream_keeps_to_its_part(percent):
    everything = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    part = part_of(DEVICE, percent, 0)
    assert everything * percent // 100 <= part.processors <= everything
    if percent <= 60:
        assert part.processors < everything * 0.75
    with torch.cuda.stream(part.stream):
        seen = torch.full((20000,), -1, dtype=torch.int32, device=DEVICE)
        where[(20000,)](seen)
        used = len(set(seen.tolist()))
    assert 0.9 * part.processors <= used <= part.processors


@pytest.mark.parametrize("percent", [45, 80])
def test_products_in_a_part_are_right_and_graphs_of_it_replay(percent):
    part = part_of(DEVICE, percent, 0)
    generator = torch.Generator(DEVICE).manual_seed(1)
    shapes = {"layers.0.qkv": (6144, 4096), "layers.0.gate_up": (4096, 2048), "layers.0.down": (2048, 4096)}
    weights = {
        name: torch.randn(shape, device=DEVICE, generator=generator).bfloat16()
        for name, shape in {**shapes, "lm_head": (5000, 2048)}.items()
    }
    torch.cuda.synchronize()
    with torch.cuda.stream(part.stream):
        prove_products(weights, 2048)
        x = torch.randn((64, 4096), device=DEVICE, generator=generator).bfloat16()
        eager = x @ weights["layers.0.qkv"].t()
        out = torch.empty_like(eager)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=part.stream):
            torch.mm(x, weights["layers.0.qkv"].t(), out=out)
        out.zero_()
        graph.replay()
        part.stream.synchronize()
    assert torch.equal(out, eager)
