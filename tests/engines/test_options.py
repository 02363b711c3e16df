"""What may be chosen for the experts, by each way that takes options, and what messages say of wrong values."""

import pickle
import threading

import numpy as np
import pytest
import torch
import ways
from engine_models import ARCHITECTURES, EXPERTS, LAYERS, experts, logits, prompts
from loading_models import own_threads, wait_for_threads
from quantized_checkpoints import PACKED
from serving import assert_served, eager, packed
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktmoe
import ktmoe.transformers as served
from ktmoe.errors import InputError, KtmoeError, UnavailableError, UnknownNameError


def _configured(folder, **options):
    config = served.Config(**options)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)


#: Those that take options.
WAYS = {
    "pack()": packed,
    "load(source='checkpoint')": lambda folder, **options: served.load(folder, source="checkpoint", **options),
    "load(source='parameters')": lambda folder, **options: served.load(folder, source="parameters", **options),
    "quantization_config=": _configured,
}


@pytest.fixture(params=WAYS)
def make(request, checkpoint):
    """options -> the same model by one of the ways."""
    return lambda **options: WAYS[request.param](checkpoint("qwen3_moe"), **options)


def layers(model) -> list[ktmoe.MoELayer]:
    return [module.ktmoe_layer for _, module in experts(model)]


def test_backend(make):
    model = make(backend="fp32_lut")
    assert_served(model)
    assert {layer.backend for layer in layers(model)} == {"fp32_lut"}
    assert torch.isfinite(logits(model, prompts())).all()


@pytest.mark.parametrize("activations", ["bf16", "int8"])
def test_activations(checkpoint, activations):
    """An option of formats that have integer codes; here the smallest: INT4."""
    folder, ids = checkpoint("Kimi INT4"), prompts()
    model = served.load(folder, activations=activations)
    assert {layer.activations for layer in layers(model)} == {activations}
    exact = logits(served.load(folder, activations="bf16"), ids)
    assert torch.equal(logits(model, ids), exact) == (activations == "bf16")


@pytest.mark.parametrize("rounding", ["exact", "folded"])
def test_rounding(checkpoint, emulator_folder, rounding):
    """amx may fold INT4's scales into its weights."""
    with ways.prepared("amx", emulator_folder):
        model = served.load(checkpoint("Kimi INT4"), backend="amx", rounding=rounding)
        assert_served(model)
        assert {layer.rounding for layer in layers(model)} == {rounding}


@pytest.mark.parametrize("tuned_for", ["decode", "prefill"])
def test_tuned_for(checkpoint, emulator_folder, tuned_for):
    with ways.prepared("amx", emulator_folder):
        model = served.load(checkpoint("Kimi INT4"), backend="amx", tuned_for=tuned_for)
        assert_served(model)
        assert {layer.tuned_for for layer in layers(model)} == {tuned_for}


def test_threads(make):
    """Of ktmoe in this process; bits do not depend on them."""
    found = []
    for threads in (1, 2):
        model = make(threads=threads)
        assert ktmoe.get_num_threads() == threads
        found.append(logits(model, prompts()))
    assert torch.equal(*found)


def test_nodes(make):
    model = make(numa_nodes=[0])
    assert {tuple(layer.placement.nodes) for layer in layers(model)} == {(0,)}
    assert torch.equal(logits(model, prompts()), logits(make(), prompts()))


def test_progress(make):
    """All bytes of the model's experts, in order, up to the end."""
    calls = []
    make(progress=lambda done, total: calls.append((done, total)))
    assert len({total for _, total in calls}) == 1
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1] > 0


@pytest.mark.parametrize("source", ["checkpoint", "parameters"])
@pytest.mark.parametrize("error", [ValueError("from progress"), KeyboardInterrupt()])
def test_an_error_from_progress(checkpoint, source, error):
    def fail(done, total):
        raise error

    with pytest.raises(type(error)) as raised:
        served.load(checkpoint("qwen3_moe"), source=source, progress=fail)
    assert error in (raised.value, raised.value.__cause__)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_while_transformers_loads_ends_loading_in_the_background(checkpoint, monkeypatch, error):
    """Even while the error's traceback holds everything."""
    started, failed, calls = threading.Event(), threading.Event(), []

    def progress(done, total):
        calls.append(failed.is_set())
        started.set()
        assert failed.wait(60)

    def fail(*args, **kwargs):
        assert started.wait(60)
        raise error("elsewhere")

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", fail)
    with pytest.raises(error, match="elsewhere") as raised:
        served.load(checkpoint("qwen3_moe"), source="checkpoint", progress=progress)
    failed.set()
    wait_for_threads()
    assert not own_threads()
    assert raised.tb  # still there
    assert calls == [False]


@pytest.mark.parametrize("source", ["checkpoint", "parameters"])
def test_a_loaded_models_config_can_be_pickled(checkpoint, source):
    config = served.load(checkpoint("qwen3_moe"), source=source, threads=1, progress=lambda done, total: None).config
    assert pickle.loads(pickle.dumps(config)).quantization_config.to_dict() == config.quantization_config.to_dict()
    assert config.quantization_config.options.threads == 1


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"backend": "cuda"}, UnknownNameError, "cuda"),
        ({"activations": "fp8"}, KtmoeError, "fp8"),
        ({"activations": "int8"}, UnavailableError, "int8"),  # there are no codes of 4 or 8 bits
        ({"rounding": "down"}, InputError, "rounding must be one of .*'down'"),
        ({"tuned_for": "chat"}, InputError, "tuned_for must be one of .*'chat'"),
        ({"threads": 0}, InputError, "threads"),
        ({"threads": "two"}, InputError, "two"),
        ({"numa_nodes": [99]}, KtmoeError, "99"),
        ({"numa_nodes": []}, InputError, "numa_nodes"),
        ({"gpu_experts_mask": [True]}, InputError, rf"bool \[{EXPERTS} experts\] .* found bool \[1\]"),
        ({"gpu_experts_mask": [1] * EXPERTS}, InputError, rf"gpu_experts_mask: .* found int64 \[{EXPERTS}\]"),
        ({"gpu_experts_mask": np.zeros((LAYERS + 1, EXPERTS), bool)}, InputError, rf"found bool \[{LAYERS + 1}, {EXPERTS}\]"),
    ],
)
def test_wrong_values(make, option, error, message):
    with pytest.raises(error, match=message):
        make(**option)


def test_a_wrong_value_leaves_a_loaded_model_as_it_was(checkpoint):
    model = eager(checkpoint("qwen3_moe"))
    expected = logits(model, prompts())
    for option in ({"backend": "cuda"}, {"activations": "int8"}, {"threads": 0}, {"numa_nodes": [99]}, {"rounding": "down"}):
        with pytest.raises(KtmoeError):
            served.pack(model, **option)
        assert torch.equal(logits(model, prompts()), expected)


def test_a_wrong_source(checkpoint):
    with pytest.raises(InputError, match=r"source must be one of .* 'file'"):
        served.load(checkpoint("qwen3_moe"), source="file")


# Experts that stay in torch; without a GPU, on the CPU


#: [experts], or [layers, experts].
MASKS = {
    "some": lambda _rows: np.arange(EXPERTS) % 3 == 0,
    "others in each layer": lambda rows: np.arange(rows * EXPERTS).reshape(rows, EXPERTS) % 3 == 0,
    "none": lambda _rows: np.zeros(EXPERTS, bool),
    "all": lambda _rows: np.ones(EXPERTS, bool),
}
#: Of torch's experts: gate, up, their function, h, an expert's output, that times its weight, their sum, and that with ktmoe's.
ROUNDINGS = 8


def check_masked(make, mask: str) -> None:
    """Each module's output beside that of the same model without a mask: bfloat16's roundings apart. make: options -> model."""
    whole = make()
    rows = len(layers(whole))
    chosen = MASKS[mask](rows)
    model = make(gpu_experts_mask=chosen)
    generator = torch.Generator().manual_seed(10)
    for row, (_, module), (_, other) in zip(
        np.broadcast_to(chosen, (rows, EXPERTS)), experts(model), experts(whole), strict=True
    ):
        assert (module.ktmoe_layer.expert_mask == ~row).all()
        assert {tensor.shape[0] for tensor in module.parameters()} == {count for count in [row.sum()] if count}
        x = torch.randn((9, module.ktmoe_layer.hidden), generator=generator).bfloat16()
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:3] for _ in range(len(x))])
        weights = torch.rand(ids.shape, generator=generator).bfloat16()
        with torch.inference_mode():
            found, expected = module(x, ids, weights).double(), other(x, ids, weights).double()
        assert torch.equal(found, expected) == (not row.any())
        assert (found - expected).norm() <= ROUNDINGS * 2**-8 * expected.norm()


@pytest.mark.parametrize("mask", MASKS)
def test_masked_experts(checkpoint, make, mask):
    check_masked(make, mask)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *PACKED])
def test_masked_experts_of_a_checkpoint(checkpoint, name):
    """Packed ones are dequantized."""
    options = {"source": "checkpoint", "activations": "bf16"}
    check_masked(lambda **mask: served.load(checkpoint(name), **options, **mask), "others in each layer")


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v4"])
def test_masked_parameters(checkpoint, name):
    check_masked(lambda **mask: packed(checkpoint(name), activations="bf16", **mask), "others in each layer")


def test_text_with_masked_experts(checkpoint):
    model = served.load(checkpoint("qwen3_moe"), gpu_experts_mask=MASKS["some"](LAYERS))
    text = model.generate(prompts(), max_new_tokens=8, do_sample=False)
    assert text.shape == (2, 32)
    assert torch.isfinite(logits(model, text)).all()
