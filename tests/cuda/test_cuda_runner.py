import functools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from cuda_models import (
    ERROR,
    GREEDY,
    SLOTS,
    Driver,
    Stream,
    ThreadedRanks,
    believable,
    expected,
    make_runner,
    prompt,
    save_model,
)

from edgemesh.engine.cuda.attention import choose
from edgemesh.engine.turns import StepRefusedError
from edgemesh.wire.ids import Layout, Plane
from edgemesh.wire.messages import Decode, IdlePlan, Plan, Sampling, Verdict

KERNELS = ["flash-attn", "torch", "auto"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    @functools.cache
    def make(family):
        path = tmp_path_factory.mktemp(family)
        return path, save_model(family, path)

    return make


@pytest.fixture(scope="module")
def runners(models):
    @functools.cache
    def make(family, kernels):
        if kernels != "torch":
            pytest.importorskip("flash_attn")
        path, _ = models(family)
        lines = []
        attention = choose(kernels, 256, 64, lines.append)
        assert len(lines) == 1
        return path, attention

    return lambda family, kernels, **more: make_runner(*make(family, kernels), **more)


def close(found, wanted):
    error = (found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() < ERROR, error.max()
    return float(error.max())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_equal_transformers_in_float32(models, runners, record_property, family, kernels):
    _, model = models(family)
    driver = Driver(runners(family, kernels))
    a, b = Stream("a", prompt(1, 700)), Stream("b", prompt(2, 33))
    errors = []
    driver.prefill(a, b, chunk=300)
    errors.append(close(driver.runner._logits[:1], expected(model, a.prompt)[-1:]))
    for number in range(5):
        graph = number != 3
        driver.decode(joins={5: a, 2: b} if number == 0 else {}, graph=graph)
        rows = torch.stack([expected(model, each.tokens[:-1])[-1] for each in (b, a)])
        errors.append(close(driver.runner._logits[:2], rows))
    believable(model, a)
    believable(model, b)
    record_property("largest_relative_error", max(errors))


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_that_come_and_go_and_steps_planned_ahead(models, runners, kernels):
    _, model = models("qwen3")
    driver = Driver(runners("qwen3", kernels))
    streams = [Stream(str(number), prompt(number, 40 + 130 * number)) for number in range(5)]
    driver.prefill(*streams[:3], chunk=128)
    driver.submit(joins={3: streams[0], 0: streams[1], 7: streams[2]})
    driver.submit()
    driver.take()
    driver.submit(sits=(3,))
    driver.take()
    driver.take()
    driver.prefill(*streams[3:], decode=True)
    driver.submit(joins={1: streams[3]}, leaves=(0,))
    driver.submit(joins={0: streams[4]})
    driver.take()
    driver.take()
    driver.idle(4)
    for _ in range(3):
        driver.submit()
        driver.submit()
        driver.take()
        driver.take()
    assert not driver.runner.flying
    for each in streams:
        believable(model, each)
    assert [len(each.output) for each in streams] == [13, 6, 14, 9, 8]


def test_a_row_grows_over_pages_while_steps_are_planned_ahead(models, runners):
    _, model = models("qwen3")
    driver = Driver(runners("qwen3", "torch"))
    a = Stream("a", prompt(9, 250))
    driver.prefill(a)
    driver.submit(joins={0: a})
    for _ in range(20):
        driver.submit()
        driver.take()
    driver.take()
    assert len(a.pages) == 2
    believable(model, a)


def test_many_rows_share_steps_of_every_size(models, runners):
    _, model = models("qwen3")
    driver = Driver(runners("qwen3", "torch"))
    streams = [Stream(str(number), prompt(100 + number, 20 + number)) for number in range(SLOTS)]
    driver.prefill(*streams, chunk=64)
    for number, each in enumerate(streams):
        driver.decode(joins={number: each})
    for each in streams:
        believable(model, each)
    for slot in range(SLOTS - 1):
        driver.decode(leaves=(slot,))
    believable(model, streams[-1])


def test_sampled_rows_draw_what_the_sampler_draws(models, runners):
    """Rows that the device draws and rows that wait for the sampler share steps; seeds decide alone."""
    settings = [
        Sampling(seed=1),
        Sampling(seed=2, temperature=0.7, top_k=20),
        Sampling(seed=3, top_p=0.8),
        Sampling(seed=4, temperature=1.5),
        Sampling(seed=1, choice=1),
        GREEDY,
        Sampling(seed=5, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5),
        Sampling(temperature=0.0, bad_words=((5,), (7, 9, 11))),
    ]
    outputs = []
    for graph in (True, False, True):
        driver = Driver(runners("qwen3", "torch"))
        streams = [Stream(str(number), prompt(7, 16), each) for number, each in enumerate(settings)]
        driver.prefill(*streams)
        driver.decode(joins=dict(enumerate(streams)), graph=graph)
        for _ in range(6):
            driver.decode(graph=graph)
        outputs.append([each.output for each in streams])
    assert outputs[0] == outputs[2]
    assert len({tuple(each) for each in outputs[0][:6]}) == 6
    same = sum(a == b for a, b in zip(outputs[0], outputs[1], strict=True))
    assert same >= 4, outputs


def test_logprobs_and_masks(models, runners):
    _, model = models("qwen3")
    driver = Driver(runners("qwen3", "torch"))
    a = Stream("a", prompt(3, 30), Sampling(temperature=0.0, logprobs=5))
    done = driver.prefill(a)
    wanted = expected(model, a.prompt)[-1].log_softmax(dim=-1)
    (found,) = done.first_logprobs
    assert found.token == a.output[0]
    assert found.logprob == pytest.approx(float(wanted[found.token]), abs=0.1)
    assert len(found.top) == 5
    words = [0] * -(-5003 // 32)
    words[100 // 32] |= 1 << (100 % 32)
    b = Stream("b", prompt(4, 30))
    driver.prefill(b)
    done = driver.decode(joins={0: a, 1: b}, masked=(1,), masks=words)
    assert done.tokens[1] == 100
    assert done.logprobs[0] is not None
    assert done.logprobs[1] is None
    driver.decode()
    believable(model, a)
    assert b.tokens[-1] == int(expected(model, b.tokens[:-1])[-1].argmax()) or b.output[1] == 100


def test_a_plan_that_cannot_run_is_refused_and_changes_nothing(runners):
    runner = runners("qwen3", "torch")
    verdicts = [
        (Verdict((3,), Layout.EVEN, 3, graph=True), "no graph of 3 rows"),
        (Verdict((3,), Layout.EVEN, 2, graph=True), "bucket 2 is less than 3"),
    ]
    for verdict, why in verdicts:
        with pytest.raises(StepRefusedError, match=why):
            runner.submit(IdlePlan(0, Plane.MIXED, 0, 0, verdict))
    with pytest.raises(StepRefusedError, match="0 prompt tokens and 0 rows"):
        runner.submit(Plan(0, Plane.MIXED, 0, 0, Verdict((1,), Layout.EVEN, 1, graph=True), None, Decode()))
    assert runner._turns.tick == 0
    assert not runner.flying


@pytest.mark.parametrize(("attn_tp", "groups"), [(2, 1), (3, 1), (2, 2)])
def test_ranks_of_sharded_models_draw_what_one_draws(models, attn_tp, groups):
    path, model = models("qwen3")
    kernels = choose("torch", 256, 64, lambda _line: None)
    sampled = Stream("c", prompt(13, 50), Sampling(seed=3, top_k=2, min_p=0.9))
    streams = [Stream("a", prompt(11, 300)), Stream("b", prompt(12, 20)), sampled]
    driver = Driver(ThreadedRanks(path, kernels, attn_tp, groups))
    driver.prefill(*streams, chunk=128)
    driver.decode(joins=dict(enumerate(streams)), graph=False)
    for _ in range(4):
        driver.decode(graph=False)
    for each in streams:
        assert len(each.output) == 6
        believable(model, each)
