"""Experts that torch computes beside ktmoe's: gpu_experts= and place(). The "GPU" is torch's CPU, and a CUDA device if there is
one."""

import gc
import json
import re
import threading
import time
import weakref

import numpy as np
import peft
import pytest
import torch
from engine_models import ARCHITECTURES, EXPERTS, LAYERS, experts, logits, prompts
from environments import ROOT
from quantized_checkpoints import PACKED
from serving import CHOOSING, assert_served, eager, eager_float32, packed, recorded, replayed, switched
from transformers import BatchEncoding

import ktmoe
import ktmoe.transformers as served
from ktmoe.compat.kt_kernel import generate_gpu_experts_masks
from ktmoe.errors import ClosedError, InputError, UnavailableError
from ktmoe.torch import add_lora
from ktmoe.transformers.gpu_experts import GpuExperts

#: What stays on the GPU of so many layers: a number, [experts], or [layers, experts].
CHOICES = {
    "number": lambda _rows: 3,
    "some": lambda _rows: np.arange(EXPERTS) % 3 == 0,
    "others in each layer": lambda rows: np.arange(rows * EXPERTS).reshape(rows, EXPERTS) % 3 == 0,
    "none": lambda _rows: np.zeros(EXPERTS, bool),
    "all": lambda _rows: np.ones(EXPERTS, bool),
}
#: bfloat16's, of torch's experts: gate, up, their function, h and an expert's output; and of the sum.
ROUNDINGS = 6
#: Formats with all that experts may have: biases, interleaved and transposed weights, codes of 4 and 8 bits.
FORMATS = ("qwen3_moe", "gpt-oss MXFP4", "DeepSeek-V4 FP4")


def batch(hidden: int, tokens: int = 9, top_k: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10)
    x = torch.randn((tokens, hidden), generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)])
    return x, ids, torch.rand(ids.shape, generator=generator).bfloat16()


def rows_of(choice, rows: int) -> np.ndarray:
    """What is on the GPU, bool [rows, experts]."""
    return np.broadcast_to(np.arange(EXPERTS) < choice if isinstance(choice, int) else choice, (rows, EXPERTS))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.double() - expected.double()).norm() <= ROUNDINGS * 2**-8 * expected.double().norm()


def first(model):
    """The first module of experts, and its layer."""
    (_, module), *_ = experts(model)
    return module, module.ktmoe_layer


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


@pytest.mark.parametrize("given", [2, np.int64(2), [True, True] + [False] * 6, torch.arange(EXPERTS) < 2])
def test_in_a_config_json(checkpoint, given):
    """What JSON made of it chooses the same."""
    plain = json.loads(json.dumps(served.Config(gpu_experts=given).to_dict()))
    model = CHOOSING["quantization_config="](checkpoint("qwen3_moe"), gpu_experts=plain["gpu_experts"])
    assert {tuple(module.gpu_experts.chosen) for _, module in experts(model)} == {(0, 1)}


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
            assert (found.double() - expected.double()).norm() <= 2 * ROUNDINGS * 2**-8 * expected.double().norm()


# place()


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
        patch.setattr(last.ktmoe_layer, "packed", object())
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
