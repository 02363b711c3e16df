"""What cannot be served is refused by class and reason, before a weight is read, and nothing is lost by asking."""

import copy
import os
import re

import pytest
import tiny_models
import torch
from engine_models import SIZES, experts, logits, prompts, save
from experts_classes import alone
from serving import WAYS, assert_served, eager, packed, switched
from transformers import AutoConfig, AutoModelForCausalLM

import ktmoe.transformers as served
from ktmoe.errors import CheckpointError, KtmoeError, UnavailableError

#: What a model is called and made of: (model_type, what its config is told, what the message says of its experts).
MODELS = {
    "no gate": ("nemotron_h", {}, r"model\.layers\.\d\.mixer\.experts \(NemotronHExperts\): .* found no gate"),
    "another activation": (
        "qwen3_moe",
        {"hidden_act": "gelu"},
        r"model\.layers\.0\.mlp\.experts \(Qwen3MoeExperts\): .* found another, act_fn GELUActivation",
    ),
    "no decorator": ("llama4_text", {}, r"Llama4ForCausalLM: .* its Llama4TextExperts to no other implementation"),
    "dense": ("qwen3", {}, r"Qwen3ForCausalLM: .* it has no routed experts"),
}


@pytest.fixture(scope="module", params=MODELS)
def refused(request, tmp_path_factory):
    """(folder, what the message says)."""
    model_type, changes, message = MODELS[request.param]
    return save(tiny_models.make(model_type, changes), tmp_path_factory.mktemp("refused")), message


def test_a_loaded_model(refused):
    folder, message = refused
    model = eager(folder)
    before = dict(model.named_parameters())
    with pytest.raises(UnavailableError, match=message):
        served.pack(model)
    assert dict(model.named_parameters()) == before
    assert model.config._experts_implementation == "eager"


@pytest.mark.smoke("one")
@pytest.mark.parametrize("source", ["auto", "checkpoint", "parameters"])
def test_before_a_weight_is_read(refused, source, tmp_path):
    """There are none."""
    folder, message = refused
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"nothing of use")
    with pytest.raises(UnavailableError, match=message):
        served.load(tmp_path, source=source)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_parameters_that_are_not_bfloat16(checkpoint, tmp_path, dtype):
    """ktmoe would round them: loading them as bfloat16 is what says so. From the checkpoint, it takes them as they are."""
    name = str(dtype).removeprefix("torch.")
    message = rf"model\.layers\.0\.mlp\.experts \(Qwen3MoeExperts\): \w+: expected bfloat16, found {name}"
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe"), dtype=dtype)
    with pytest.raises(UnavailableError, match=message):
        served.pack(model)
    assert [each.dtype for _, module in experts(model) for each in module.parameters()] == [dtype] * 6
    folder = save(model, tmp_path)
    rounded = served.load(folder, source="parameters", dtype=torch.bfloat16)
    assert torch.equal(logits(rounded, prompts()), logits(packed(checkpoint("qwen3_moe")), prompts()))
    exact = served.load(folder, source="checkpoint", dtype=torch.bfloat16)  # the same numbers, added in another order
    torch.testing.assert_close(logits(exact, prompts()), logits(rounded, prompts()), rtol=2**-6, atol=2**-6)
    os.truncate(folder / "model.safetensors", 0)  # nor is it read
    os.truncate(folder / "model.safetensors", 10**7)
    for source in ("auto", "parameters"):
        with pytest.raises(UnavailableError, match=message):
            served.load(folder, source=source)


def test_one_layer_that_is_not_bfloat16(checkpoint):
    """None is packed then."""
    model = eager(checkpoint("qwen3_moe"))
    *others, (_, last) = experts(model)
    last.float()
    with pytest.raises(UnavailableError, match=r"model\.layers\.2\.mlp\.experts .* found float32"):
        served.pack(model)
    assert [len(list(module.parameters())) for _, module in others] == [2, 2]


def test_parameters_that_are_not_in_memory(checkpoint):
    """As accelerate leaves them when it offloads. Nothing is packed."""
    model = eager(checkpoint("qwen3_moe"))
    *_, (_, last) = experts(model)
    last.to("meta")
    with pytest.raises(UnavailableError, match="expected gate_up_proj, down_proj in memory, found the device meta"):
        served.pack(model)
    assert not [module for module in model.modules() if hasattr(module, "ktmoe_layer")]


def test_packed_weights_cannot_be_read_as_parameters(checkpoint):
    with pytest.raises(UnavailableError, match="expected an unquantized checkpoint, found quant_method 'mxfp4'"):
        served.load(checkpoint("gpt-oss MXFP4"), source="parameters")


@pytest.mark.parametrize("source", ["auto", "checkpoint"])
def test_other_sizes_than_the_checkpoint_has(checkpoint, source):
    config = AutoConfig.from_pretrained(checkpoint("qwen3_moe"))
    config.num_experts = SIZES["num_experts"] // 2
    with pytest.raises(CheckpointError, match="num_experts 4, found 8"):
        served.load(checkpoint("qwen3_moe"), config=config, source=source)


@pytest.fixture(scope="module")
def text(checkpoint):
    """The logits that each way gives."""
    return logits(packed(checkpoint("qwen3_moe")), prompts())


@pytest.mark.smoke("one")
@pytest.mark.parametrize("way", WAYS)
def test_saving_and_copying(checkpoint, text, tmp_path, way):
    """Packed weights are not a checkpoint's, and a layer's memory belongs to one object. The model is as good as before."""
    model = WAYS[way](checkpoint("qwen3_moe"))
    logits(model, prompts())
    with pytest.raises((ValueError, UnavailableError), match=r"is not serializable|expected to be saved before it was packed"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    with pytest.raises((TypeError, KtmoeError), match="MoELayer"):
        copy.deepcopy(model)
    assert_served(model)
    assert torch.equal(logits(model, prompts()), text)


@pytest.mark.parametrize("way", WAYS)
def test_back_to_eager(checkpoint, text, way):
    """What eager would need was freed, and the message says what to do; going back again loses nothing."""
    model = WAYS[way](checkpoint("qwen3_moe"))
    logits(model, prompts())
    for other in ("eager", "grouped_mm"):
        model.set_experts_implementation(other)
        with pytest.raises(UnavailableError, match=r"Qwen3MoeExperts: its parameters were freed .* load the model again"):
            logits(model, prompts())
    model.set_experts_implementation("ktmoe")
    assert torch.equal(logits(model, prompts()), text)


@pytest.mark.parametrize("make", [packed, switched])
def test_packing_twice(checkpoint, text, make):
    model = make(checkpoint("qwen3_moe"))
    logits(model, prompts())
    with pytest.raises(UnavailableError, match="expected experts that are not packed yet"):
        served.pack(model)
    assert torch.equal(logits(model, prompts()), text)


def test_a_switched_model_can_be_switched_back_before_its_first_call(checkpoint):
    model, other = switched(checkpoint("qwen3_moe")), eager(checkpoint("qwen3_moe"))
    model.set_experts_implementation("eager")
    assert torch.equal(logits(model, prompts()), logits(other, prompts()))


def test_the_first_call_refuses(checkpoint):
    """set_experts_implementation() cannot: it only notes the name."""
    model = alone("NemotronHExperts")
    model.set_experts_implementation("ktmoe")
    with pytest.raises(UnavailableError, match=r"experts \(NemotronHExperts\): .* found no gate"):
        model.experts(torch.zeros(1, 64).bfloat16(), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
    assert len(list(model.experts.parameters())) == 2


def test_float16_goes_by_way_of_float32(checkpoint):
    (_, module), *_ = experts(packed(checkpoint("qwen3_moe")))
    x = torch.randn((5, 64), generator=torch.Generator().manual_seed(8))
    ids, weights = torch.arange(15).reshape(5, 3) % 8, torch.full((5, 3), 1 / 3)
    found = module(x.half(), ids, weights.half())
    assert found.dtype == torch.float16
    assert torch.equal(found, module(x.half().float(), ids, weights.half().float()).half())


def test_the_name_is_ktmoes():
    """transformers names it among the implementations that it knows."""
    with pytest.raises(ValueError, match=re.escape('experts_implementation="ktmoe"')):
        alone("MixtralExperts").set_experts_implementation("ktmo")
