"""Tiny random models and lock-step ranks, shared by the tests of the network and of the runner."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import transformers

from edgemesh.engine.collectives import Collectives, alone
from edgemesh.engine.layout import Split, local
from edgemesh.engine.local import local_collectives
from edgemesh.engine.runner import Runner
from edgemesh.engine.shape import ModelShape, read_shape
from edgemesh.engine.turns import Limits, Station
from edgemesh.engine.weights import DTYPES, shard_all
from edgemesh.wire.ids import Plane

PAGES, PAGE_TOKENS, SLOTS, POSITIONS = 40, 4, 6, 48
T = TypeVar("T")

COMMON = {
    "hidden_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 101,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_model(family: str, path: Path, **changes: object) -> transformers.PreTrainedModel:
    """A tiny random model of a family, written as a Hugging Face directory."""
    config_type = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[family]
    config = getattr(transformers, config_type)(**{**COMMON, **changes})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases start as ones and zeros, which would hide that they are not applied.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(4.0 if "embed" not in name else 1.0)
    model.save_pretrained(path)
    return model


def run_ranks(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run every rank's job in a thread of its own; the first failure is raised."""
    results: list[T | BaseException | None] = [None] * len(jobs)

    def work(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Mesh:
    """Every rank of one coupled set, each with its shards; ``execute`` runs one plan per group."""

    def __init__(
        self,
        path: Path,
        attn_tp: int,
        groups: int = 1,
        *,
        pads: bool = False,
        plane: Plane = Plane.MIXED,
        dtype: str = "float32",
    ) -> None:
        self.attn_tp, self.groups, self.plane = attn_tp, groups, plane
        self.shape = read_shape(path / "config.json", dtype)
        ends = local_collectives(attn_tp, groups, pads=pads) if attn_tp * groups > 1 else [alone()]
        self.runners = [self._runner(path, rank, ends[rank], dtype) for rank in range(attn_tp * groups)]

    def _runner(self, path: Path, rank: int, end: Collectives, dtype: str) -> Runner:
        group, attn_rank = divmod(rank, self.attn_tp)
        split = Split(self.attn_tp, attn_rank, self.attn_tp * self.groups, rank)
        tensors = {**shard_all(path, split, dtype), "kv": slab(self.shape, split, dtype)}
        limits = Limits(PAGES, PAGE_TOKENS, SLOTS, POSITIONS, self.shape.vocab)
        return Runner(Station(group, self.plane, 0, group, self.groups), limits, self.shape, split, tensors, end)

    def execute(self, plans: Sequence[object]) -> list[object]:
        """The answer of each group's leader; every rank of a group must give the same."""
        jobs = [
            lambda runner=runner, plan=plans[rank // self.attn_tp]: runner.execute(plan)
            for rank, runner in enumerate(self.runners)
        ]
        return run_ranks(jobs)[:: self.attn_tp]


def slab(shape: ModelShape, split: Split, dtype: str = "float32") -> torch.Tensor:
    """A KV slab full of rubbish, as after other requests."""
    sizes = (shape.layers, 2, PAGES, PAGE_TOKENS, local(shape, split).kv_local, shape.head_dim)
    return torch.full(sizes, 1e3, dtype=DTYPES[dtype])
