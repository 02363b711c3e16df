"""gpu_experts=: experts that torch computes beside ktmoe's. The "GPU" is torch's CPU."""

import json
import threading
import time

import numpy as np
import pytest
import torch
from engine_models import ARCHITECTURES, EXPERTS, LAYERS, experts, logits, prompts
from quantized_checkpoints import PACKED
from serving import CHOOSING, eager, eager_float32, packed, recorded, replayed
from split_experts import CHOICES, FORMATS, ROUNDINGS, assert_near, batch, first

import ktmoe
import ktmoe.transformers as served
from ktmoe.errors import InputError
from ktmoe.transformers.gpu_experts import GpuExperts


def rows_of(choice, rows: int) -> np.ndarray:
    """What is on the GPU, bool [rows, experts]."""
    return np.broadcast_to(np.arange(EXPERTS) < choice if isinstance(choice, int) else choice, (rows, EXPERTS))


# Which experts, and what comes out


def check(make, choice: str) -> None:
    """Each module's output beside that of the same model with all experts on the CPU. make: options -> model."""
    whole = make()
    modules = list(experts(whole))
    chosen = CHOICES[choice](len(modules))
    model = make(gpu_experts=chosen)
    for row, (_, module), (_, other) in zip(rows_of(chosen, len(modules)), experts(model), modules, strict=True):
        assert {tensor.shape[0] for tensor in module.buffers()} == {count for count in [row.sum()] if count}
        assert list(module.parameters()) == []
        x, ids, weights = batch(module.ktmoe_layer.hidden)
        with torch.inference_mode():
            found, expected = module(x, ids, weights), other(x, ids, weights)
        assert torch.equal(found, expected) == (not row.any())
        assert_near(found, expected)


@pytest.mark.parametrize("way", CHOOSING)
@pytest.mark.parametrize("choice", CHOICES)
def test_each_way(checkpoint, way, choice):
    check(lambda **options: CHOOSING[way](checkpoint("qwen3_moe"), **options), choice)


@pytest.mark.smoke("one")
@pytest.mark.parametrize("name", [*ARCHITECTURES, *PACKED])
def test_each_checkpoint(checkpoint, name):
    """Packed ones are dequantized."""
    options = {"source": "checkpoint", "activations": "bf16"}
    check(lambda **chosen: served.load(checkpoint(name), **options, **chosen), "others in each layer")


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v4"])
def test_parameters(checkpoint, name):
    check(lambda **chosen: packed(checkpoint(name), activations="bf16", **chosen), "others in each layer")


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_as_near_to_float32s(checkpoint, name):
    """As transformers' own bfloat16 experts are, as tests of whole models on the CPU have it."""
    folder, ids = checkpoint(name), prompts()
    reference = eager_float32(folder)
    with recorded(reference) as calls:
        exact = logits(reference, ids)
    distances = []
    for model in (served.load(folder, activations="bf16", gpu_experts=EXPERTS // 2), eager(folder)):
        with replayed(model, calls):
            distances.append(float((logits(model, ids) - exact).norm()))
    assert distances[0] <= 1.2 * distances[1]


@pytest.mark.smoke
def test_text(checkpoint):
    """Greedy: each token has the largest logit of what is before it."""
    model = served.load(checkpoint("qwen3_moe"), gpu_experts=CHOICES["others in each layer"](LAYERS), dtype=torch.float32)
    text = model.generate(prompts(), max_new_tokens=8, do_sample=False)
    assert text.shape == (2, 32)
    assert torch.equal(logits(model, text)[:, 23:-1].argmax(-1), text[:, 24:])


def test_masks_of_a_model_with_dense_layers(checkpoint):
    """A row for each layer that has experts, or for all: kt-kernel's masks have True in the rows of dense ones."""
    folder = checkpoint("glm4_moe")
    short = CHOICES["others in each layer"](LAYERS - 1)
    expected = logits(served.load(folder, gpu_experts=short), prompts())
    for dense in (False, True):
        whole = torch.from_numpy(np.concatenate([np.full((1, EXPERTS), dense), short]))
        for given in (whole, whole.numpy(), whole.tolist()):
            model = served.load(folder, gpu_experts=given)
            assert torch.equal(logits(model, prompts()), expected)
    assert not torch.equal(logits(served.load(folder), prompts()), expected)
    with pytest.raises(InputError, match=rf"\[2 layers with experts or all 3 layers, {EXPERTS} experts\], found bool \[4, "):
        served.load(folder, gpu_experts=np.ones((4, EXPERTS), bool))


def test_no_memory_on_the_gpu(checkpoint, monkeypatch):
    """The model that pack() was given computes all experts on the CPU then."""
    model = eager(checkpoint("qwen3_moe"))

    def fail(*arguments):
        raise torch.OutOfMemoryError("of the GPU")

    with monkeypatch.context() as patch:
        patch.setattr(GpuExperts, "__init__", fail)
        with pytest.raises(torch.OutOfMemoryError, match="of the GPU"):
            served.pack(model, gpu_experts=2)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(logits(model, prompts()), logits(packed(checkpoint("qwen3_moe")), prompts()))


@pytest.mark.parametrize("given", [2, np.int64(2), [True, True] + [False] * 6, torch.arange(EXPERTS) < 2])
def test_in_a_config_json(checkpoint, given):
    """What JSON made of it chooses the same."""
    plain = json.loads(json.dumps(served.Config(gpu_experts=given).to_dict()))
    model = CHOOSING["quantization_config="](checkpoint("qwen3_moe"), gpu_experts=plain["gpu_experts"])
    assert {tuple(module.gpu_experts.chosen) for _, module in experts(model)} == {(0, 1)}


# The sum of both parts


@pytest.fixture
def model(checkpoint):
    return served.load(checkpoint("qwen3_moe"), gpu_experts=4)


def test_a_call_that_no_expert_on_the_gpu_is_in(model):
    """Has the bits of the CPU's experts alone."""
    module, layer = first(model)
    x, ids, weights = batch(layer.hidden)
    ids = 4 + ids % 4
    assert torch.equal(module(x, ids, weights), layer.forward(x, ids, weights.float()))


def test_tokens_that_chose_no_expert_on_the_gpu(model):
    """Have the same bits in a call of others that did."""
    module, layer = first(model)
    x, ids, weights = batch(layer.hidden)
    ids[::2] = 4 + ids[::2] % 4
    ids[1::2, 0] = 0
    found, expected = module(x, ids, weights), layer.forward(x, ids, weights.float())
    assert torch.equal(found[::2], expected[::2])
    assert not (found[1::2] == expected[1::2]).all(dim=1).any()


def test_ids_that_are_no_experts_and_an_expert_that_is_there_twice(model):
    module, layer = first(model)
    x, ids, weights = batch(layer.hidden)
    ids[0], ids[1], ids[2] = -1, EXPERTS, 2**40
    ids[3, :], ids[4, :] = 1, 6
    ids[5, 0] = -(2**40)
    found, expected = module(x, ids, weights), layer.forward(x, ids, weights.float())
    assert not found[:3].any()
    assert expected[3:].all(dim=1).all()
    assert_near(found[3:], expected[3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_expert_is_computed_once_and_the_sum_rounded_once(model, monkeypatch, dtype):
    """In float32: the CPU's part, and then the GPU's experts in the order of the ids."""
    module, layer = first(model)
    seen, compute = [], GpuExperts.compute

    def recording(self, x, weights, chosen):
        seen.append((chosen, compute(self, x, weights, chosen)))
        return seen[-1][1]

    monkeypatch.setattr(GpuExperts, "compute", recording)
    x, ids, weights = batch(layer.hidden, tokens=40)
    found = module(x.to(dtype), ids, weights)
    ((chosen, outputs),) = seen
    here = ids < 4
    assert torch.equal(chosen.others, torch.where(here, -1, ids))
    assert sorted(chosen.places.tolist()) == here.flatten().nonzero().flatten().tolist()
    assert outputs.dtype == torch.float32
    y = layer.forward(x.float(), chosen.others, weights.float())
    assert y.any()
    for place in here.flatten().nonzero().flatten().tolist():
        y[place // 3] += outputs[chosen.places.tolist().index(place)]
    assert torch.equal(found, y.to(dtype))


@pytest.mark.parametrize("late", ["CPU", "GPU"])
def test_bits_do_not_depend_on_which_part_is_later(model, monkeypatch, late):
    expected = logits(model, prompts())
    owner, method = (ktmoe.MoELayer, "forward") if late == "CPU" else (GpuExperts, "compute")
    original = getattr(owner, method)

    def slow(*arguments):
        time.sleep(0.05)
        return original(*arguments)

    monkeypatch.setattr(owner, method, slow)
    assert torch.equal(logits(model, prompts()), expected)


def test_both_parts_run_at_once(model, monkeypatch):
    """Each waits until the other has begun."""
    meeting = threading.Barrier(2, timeout=30)
    for owner, method in ((ktmoe.MoELayer, "forward"), (GpuExperts, "compute")):
        original = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *arguments, original=original: (meeting.wait(), original(*arguments))[1])
    module, layer = first(model)
    assert torch.isfinite(module(*batch(layer.hidden))).all()


def test_an_error_of_one_part(model, monkeypatch):
    """It is raised, after the other part has ended, and the next call is as before."""
    module, layer = first(model)
    expected, ended = module(*batch(layer.hidden)), []
    original = ktmoe.MoELayer.forward

    def slow(*arguments):
        time.sleep(0.05)
        ended.append(original(*arguments))
        return ended[-1]

    def fail(*arguments):
        raise torch.OutOfMemoryError("of the GPU")

    with monkeypatch.context() as patch:
        patch.setattr(ktmoe.MoELayer, "forward", slow)
        patch.setattr(GpuExperts, "compute", fail)
        with pytest.raises(torch.OutOfMemoryError, match="of the GPU"):
            module(*batch(layer.hidden))
        assert ended
    assert torch.equal(module(*batch(layer.hidden)), expected)


def test_gradients(checkpoint):
    """Through both parts, as through experts that are all on the CPU."""
    folder, gradients = checkpoint("gpt-oss MXFP4"), []
    for chosen in (None, CHOICES["some"](LAYERS), EXPERTS):
        module, layer = first(served.load(folder, activations="bf16", gpu_experts=chosen))
        x, ids, weights = batch(layer.hidden)
        x.requires_grad_()
        weights = weights.float().requires_grad_()
        y = module(x, ids, weights)
        (y.float() * torch.arange(y.shape[1])).sum().backward()
        gradients.append((y.detach(), x.grad, weights.grad))
    whole, *others = gradients
    for other in others:
        for found, expected in zip(other, whole, strict=True):
            assert found.dtype == expected.dtype
            assert not torch.equal(found, expected)
            assert_near(found, expected, 2 * ROUNDINGS)
