"""place(): experts that come to the GPU and leave it at run time. It is torch's CPU here, and a CUDA device if there is one."""

import gc
import re
import threading
import weakref

import numpy as np
import peft
import pytest
import torch
from bare import Bare
from engine_models import EXPERTS, LAYERS, experts, logits, prompts
from environments import ROOT
from serving import CHOOSING, assert_served, eager, switched
from split_experts import CHOICES, FORMATS, assert_near, batch, first
from transformers import BatchEncoding

import ktmoe.transformers as served
from ktmoe.compat.kt_kernel import generate_gpu_experts_masks
from ktmoe.errors import ClosedError, InputError, UnavailableError
from ktmoe.torch import add_lora


@pytest.fixture
def model(checkpoint):
    return served.load(checkpoint("qwen3_moe"), gpu_experts=4)


@pytest.mark.parametrize("name", FORMATS)
def test_placed_as_loaded(checkpoint, name):
    """The bits of a model that was loaded so; back and forth gives the first bits again; what need not move stays."""
    folder, ids = checkpoint(name), prompts()
    choices = [CHOICES["some"](LAYERS), CHOICES["others in each layer"](LAYERS), None, EXPERTS, 3]
    expected = [logits(served.load(folder, gpu_experts=choice), ids) for choice in choices]
    assert not torch.equal(expected[0], expected[2])
    model = served.load(folder)
    for i in (0, 1, 2, 3, 4, 0, 4, 1, 2):
        served.place(model, choices[i])
        assert torch.equal(logits(model, ids), expected[i])
    assert_served(model)
    served.place(model, 3)
    before = [module.gpu_experts for _, module in experts(model)]
    served.place(model, np.arange(EXPERTS) < 3)
    assert [module.gpu_experts for _, module in experts(model)] == before


@pytest.mark.parametrize("way", [*CHOOSING, "switched"])
def test_placed_after_each_way(checkpoint, way):
    folder, ids = checkpoint("qwen3_moe"), prompts()
    expected = logits(served.load(folder, gpu_experts=3), ids)
    model = switched(folder) if way == "switched" else CHOOSING[way](folder)
    logits(model, ids)
    served.place(model, 3)
    assert torch.equal(logits(model, ids), expected)


def test_hot_experts(checkpoint):
    """Those that a text uses most are placed, and compute most of it."""
    model, ids = served.load(checkpoint("glm4_moe")), prompts()
    with served.count_experts(model) as counts:
        logits(model, ids)
    masks = generate_gpu_experts_masks(counts, 6)
    served.place(model, masks)
    assert [module.gpu_experts.chosen.tolist() for _, module in experts(model)] == [
        np.flatnonzero(row).tolist() for row in masks
    ]
    assert counts[masks].sum() > counts.sum() * 6 / masks.size
    assert_near(logits(model, ids), logits(served.load(checkpoint("glm4_moe")), ids))


@pytest.mark.smoke
def test_the_page(checkpoint):
    """docs/transformers.md's own code, on a tiny model and the CPU."""
    section = (ROOT / "docs" / "transformers.md").read_text().partition("## Experts on a GPU")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    for old, new in (("openai/gpt-oss-20b", str(checkpoint("gpt-oss MXFP4"))), ('"cuda"', '"cpu"'), ("400", "6"), ("200", "5")):
        assert old in code
        code = code.replace(old, new)
    names = {"prompt": BatchEncoding({"input_ids": prompts()})}
    exec(code, names)
    assert (names["counts"].sum(1) == 2 * (24 + 4) * 3).all()
    assert sum(len(module.gpu_experts.chosen) for _, module in experts(names["model"]) if module.gpu_experts) == 6


def test_memory_is_given_back(model):
    """Of experts that leave the GPU, and of those that others come to."""
    gc.disable()  # nothing is in a circle
    try:
        for choice in (5, None):
            tensors = [weakref.ref(tensor) for _, module in experts(model) for tensor in module.gpu_experts.buffers()]
            assert len(tensors) == 2 * LAYERS
            served.place(model, choice)
            assert [tensor() for tensor in tensors] == [None] * len(tensors)
    finally:
        gc.enable()
    assert_served(model)


def test_placed_in_inference_mode_and_then_trained(checkpoint):
    model = served.load(checkpoint("qwen3_moe"), activations="bf16")
    with torch.inference_mode():
        served.place(model, 4)
    module, layer = first(model)
    x, ids, weights = batch(layer.hidden)
    module(x.requires_grad_(), ids, weights).sum().backward()
    assert x.grad.any()


def test_placed_beneath_peft(checkpoint):
    """Whose adapters on attention are trained through both parts."""
    model = served.load(checkpoint("qwen3_moe"), activations="bf16")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    before = model(input_ids=prompts(), labels=prompts()).loss
    served.place(model, 4)
    loss = model(input_ids=prompts(), labels=prompts()).loss
    loss.backward()
    assert loss != before
    assert_near(loss, before)
    assert all(parameter.grad.any() for parameter in model.parameters() if parameter.requires_grad)


def test_placed_while_others_call(checkpoint):
    """Each call has each expert once, wherever it is."""
    model = served.load(checkpoint("qwen3_moe"))
    module, layer = first(model)
    arguments, done, found = batch(layer.hidden), threading.Event(), []
    expected = module(*arguments)

    def call():
        while not done.is_set():
            found.append(module(*arguments))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(60):
        served.place(model, np.random.default_rng(i).random(EXPERTS) < 0.5)
    done.set()
    for thread in threads:
        thread.join()
    assert len(found) > 20
    for y in found:
        assert_near(y, expected)


def test_what_cannot_be_placed(checkpoint, monkeypatch):
    """It says why, and leaves the model as it is."""
    folder, name = checkpoint("qwen3_moe"), r"model\.layers\.0\.mlp\.experts"
    for model, message in (
        (eager(folder), rf"{name} \(Qwen3MoeExperts\): expected packed experts, found others; ktmoe\.transformers\.pack\(\)"),
        (switched(folder), "expected packed experts, found others"),
        (eager(folder).lm_head, "Linear: expected a model of transformers with packed experts, found none"),
        (
            served.load(folder).model.layers[0],
            "Qwen3MoeDecoderLayer: expected a model of transformers with packed experts, found a part",
        ),
    ):
        with pytest.raises(UnavailableError, match=message):
            served.place(model, 1)
    model = served.load(folder, activations="bf16", gpu_experts=2)
    expected = logits(model, prompts())
    for wrong in (EXPERTS + 1, np.ones(EXPERTS), np.ones((LAYERS + 1, EXPERTS), bool), [[True], [True, True]]):
        with pytest.raises(InputError, match="gpu_experts: expected"):
            served.place(model, wrong)
    *_, (_, last) = experts(model)
    with monkeypatch.context() as patch:
        patch.setattr(last.ktmoe_layer, "packed", Bare())
        with pytest.raises(UnavailableError, match=r"layers\.2\..*: backend '\w+' cannot give weights back"):
            served.place(model, 3)
    router = model.model.layers[2].mlp.gate
    weight, router.weight = router.weight, torch.nn.Parameter(router.weight.to("meta"))
    with pytest.raises(
        UnavailableError, match=r"layers\.2\..*: expected the rest of its block in memory, found the device meta"
    ):
        served.place(model, 3)
    router.weight = weight
    assert torch.equal(logits(model, prompts()), expected)
    served.place(model, 0)
    add_lora(model)
    with pytest.raises(UnavailableError, match=rf"{name}: expected experts without adapters"):
        served.place(model, 1)
    other = served.load(folder)
    first(other)[1].close()
    with pytest.raises(ClosedError, match=rf"{name}: its layer was closed"):
        served.place(other, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device here")
@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu(checkpoint, name):
    """The rest of the model and some experts on a real one, and place() there and back."""
    folder, ids = checkpoint(name), prompts()
    expected = logits(served.load(folder, activations="bf16"), ids)
    model = served.load(folder, activations="bf16", gpu_experts=3, device_map="cuda")
    module, _ = first(model)
    assert module.gpu_experts.device.type == "cuda"
    found = logits(model, ids.cuda())
    assert (found.cpu() - expected).norm() <= 0.1 * expected.norm()
    for choice in (0, EXPERTS, 3):
        served.place(model, choice)
    assert torch.equal(logits(model, ids.cuda()), found)
