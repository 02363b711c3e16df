"""Adapters in files, with PEFT itself: it loads what ktmoe writes, ktmoe reads what it trains; both add the same weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import engine_models
import numpy as np
import peft
import pytest
import torch

import ktmoe.torch
import ktmoe.transformers
from ktmoe.adapters import export_adapter, import_adapter, merge_adapter
from ktmoe.training.lora import Lora
from ktmoe.transformers.modules import examine

RANK = 3
SUBSETS = [("gate", "up", "down"), ("up",), ("down",), ("gate", "down")]


def experts_of(model) -> dict:
    """The modules of experts, by layer number."""
    return {found.layer: found for found in (examine(module, name) for name, module in engine_models.experts(model))}


def adapters(model, projections, layers=2) -> dict[int, Lora]:
    """Adapters for the first layers that have experts, with numbers large enough to matter."""
    random, made = np.random.default_rng(1), {}
    for layer, experts in list(experts_of(model).items())[:layers]:
        pairs = {}
        for projection in projections:
            n, k = experts.intermediate, experts.hidden
            n, k = (k, n) if projection == "down" else (n, k)
            shapes = (experts.num_experts, RANK, k), (experts.num_experts, n, RANK)
            pairs[projection] = tuple((random.standard_normal(shape) / 8).astype(np.float32) for shape in shapes)
        made[layer] = Lora(pairs, 6.0 + layer)
    return made


def with_weights(model, loras: dict[int, Lora]):
    """The model in float32 with W + s B A in the places of its experts' own weights."""
    model = copy.deepcopy(model)
    for layer, lora in loras.items():
        experts = experts_of(model)[layer]
        module, half = experts.module, experts.intermediate
        for projection, (a, b) in lora.pairs.items():
            change = lora.scale * torch.from_numpy(b) @ torch.from_numpy(a)
            stored = module.down_proj.data if projection == "down" else module.gate_up_proj.data
            weights = stored.transpose(1, 2) if module.is_transposed else stored
            if projection != "down":
                second = projection == "up"
                concatenated = weights[:, half:] if second else weights[:, :half]
                weights = concatenated if module.is_concatenated else weights[:, int(second) :: 2]
            weights += change
    return model


def written(model, folder: Path) -> Path:
    """A folder that has the model's config.json alone."""
    model.config.save_pretrained(folder)
    return folder


@pytest.mark.smoke("one")
@pytest.mark.parametrize("name", engine_models.ARCHITECTURES)
def test_peft_loads_what_ktmoe_writes(name, tmp_path):
    """In float32, PEFT's model gives the logits of one with the sums as its weights; saved by PEFT again, all numbers stay."""
    model, ids = engine_models.make(name).float(), engine_models.prompts()
    plain = engine_models.logits(model, ids)
    for projections in SUBSETS:
        loras, folder = adapters(model, projections), tmp_path / "-".join(projections)
        export_adapter(folder, loras, written(model, tmp_path / "model"))
        adapted = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder)
        found, expected = engine_models.logits(adapted, ids), engine_models.logits(with_weights(model, loras), ids)
        assert (found - expected).abs().max() < 2e-5
        assert (found - plain).abs().max() > 0.1
        adapted.save_pretrained(folder / "again")
        again = import_adapter(folder / "again", tmp_path / "model")
        assert again.keys() == loras.keys()
        for layer, lora in loras.items():
            assert (again[layer].rank, again[layer].scale) == (lora.rank, lora.scale)
            for projection, pair in lora.pairs.items():
                for array, wanted in zip(again[layer].pairs[projection], pair, strict=True):
                    np.testing.assert_array_equal(array, wanted)


@pytest.mark.smoke("one")
@pytest.mark.parametrize("name", engine_models.ARCHITECTURES)
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["", "rslora"])
def test_ktmoe_reads_what_peft_trains(name, options, tmp_path):
    model, ids = engine_models.make(name).float(), engine_models.prompts()
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={r".*\.down_proj": 2},
        alpha_pattern={r".*\.down_proj": 4 / 2**0.5 if options else 4},
        init_lora_weights=False,
        **options,
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    adapted.save_pretrained(tmp_path)
    loras = import_adapter(tmp_path, written(model, tmp_path / "model"))
    assert loras.keys() == experts_of(model).keys()
    found, expected = engine_models.logits(adapted, ids), engine_models.logits(with_weights(model, loras), ids)
    assert (found - expected).abs().max() < 2e-5
    assert (found - engine_models.logits(model, ids)).abs().max() > 0.1


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


@pytest.mark.smoke("one")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v4"])
def test_ktmoe_and_peft_compute_the_same(name, checkpoint, tmp_path):
    """With one adapter, ktmoe's packed experts are as near to PEFT in float32 as PEFT in bfloat16 is."""
    model, ids = engine_models.make(name), engine_models.prompts()
    loras = adapters(model, ("gate", "up", "down"))
    export_adapter(tmp_path, loras, checkpoint(name))
    rounded = engine_models.logits(peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path), ids)
    exact = engine_models.logits(peft.PeftModel.from_pretrained(model.float(), tmp_path), ids)
    packed = ktmoe.transformers.load(checkpoint(name), activations="bf16")
    plain = relative(engine_models.logits(packed, ids), exact)
    ktmoe.torch.add_lora(packed, given=import_adapter(tmp_path, checkpoint(name)))
    found = relative(engine_models.logits(packed, ids), exact)
    assert found < 1.2 * relative(rounded, exact)
    assert 4 * found < plain


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_what_is_merged(name, tmp_path):
    """transformers loads it, with the weights that PEFT's own merge gives in float32, rounded to bfloat16 once."""
    model = engine_models.make(name)
    engine_models.save(model, tmp_path / "model")
    loras = adapters(model, ("gate", "up", "down"))
    export_adapter(tmp_path / "adapter", loras, tmp_path / "model")
    merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    found = type(model).from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    expected = peft.PeftModel.from_pretrained(copy.deepcopy(model).float(), tmp_path / "adapter").merge_and_unload()
    given = found.state_dict()
    for key, weight in expected.state_dict().items():
        wanted = weight.to(given[key].dtype)
        # float32 sums in another order are a rounding apart, which bfloat16 sees in few places, as its next number
        assert (given[key] != wanted).float().mean() < 1e-3
        torch.testing.assert_close(given[key].float(), wanted.float(), rtol=2**-7, atol=1e-6)


def test_modules_of_each_expert(tmp_path):
    """Where each expert has linear modules of its own, as in models of others and in transformers 4."""
    linear = torch.nn.Linear

    class Expert(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = linear(8, 6, False), linear(8, 6, False), linear(6, 8, False)

    class Model(torch.nn.Module):
        prepare_inputs_for_generation = None  # as PEFT expects of a causal language model

        def __init__(self):
            super().__init__()
            layer = torch.nn.Module()
            layer.mlp = torch.nn.Module()
            layer.mlp.experts = torch.nn.ModuleList(Expert() for _ in range(4))
            self.model = torch.nn.Module()
            self.model.layers = torch.nn.ModuleList([layer])

    random = np.random.default_rng(2)
    pairs = {
        projection: (random.standard_normal((4, 2, k)).astype(np.float32), random.standard_normal((4, n, 2)).astype(np.float32))
        for projection, (n, k) in {"gate": (6, 8), "down": (8, 6)}.items()
    }
    lora, model = Lora(pairs, 3.0), Model()
    before = copy.deepcopy(model.state_dict())
    export_adapter(tmp_path, {0: lora}, {"model_type": "deepseek_v3"}, fused_experts=False)
    after = peft.PeftModel.from_pretrained(model, tmp_path).merge_and_unload().state_dict()
    for expert in range(4):
        for projection in ("gate", "up", "down"):
            key = f"model.layers.0.mlp.experts.{expert}.{projection}_proj.weight"
            change = 0
            if projection in pairs:
                a, b = pairs[projection]
                change = 1.5 * torch.from_numpy(b[expert]) @ torch.from_numpy(a[expert])
            torch.testing.assert_close(after[key], before[key] + change)


def test_beside_attention(tmp_path):
    """PEFT uses an adapter of attention and one of experts at once; a folder with both is read for the experts alone."""
    model, ids = engine_models.make("qwen3_moe").float(), engine_models.prompts()
    targets = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**targets)).save_pretrained(tmp_path / "attention")
    loras = adapters(model, ("gate", "up", "down"))
    export_adapter(tmp_path / "experts", loras, written(model, tmp_path / "model"))
    both = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "attention")
    both.load_adapter(tmp_path / "experts", "experts")
    both.base_model.set_adapter(["default", "experts"])
    expected = peft.PeftModel.from_pretrained(with_weights(model, loras), tmp_path / "attention")
    assert (engine_models.logits(both, ids) - engine_models.logits(expected, ids)).abs().max() < 2e-5
    parameters = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    config = peft.LoraConfig(target_parameters=parameters, **targets)
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path / "together")
    with pytest.raises(ValueError, match=r"self_attn.*experts_only=True"):
        import_adapter(tmp_path / "together", tmp_path / "model")
    assert import_adapter(tmp_path / "together", tmp_path / "model", experts_only=True).keys() == experts_of(model).keys()


def test_dropout_is_refused_by_both(tmp_path):
    model = engine_models.make("qwen3_moe")
    export_adapter(tmp_path, adapters(model, ("down",)), written(model, tmp_path / "model"))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.1}))
    with pytest.raises(ValueError, match="lora_dropout"):
        peft.PeftModel.from_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="lora_dropout"):
        import_adapter(tmp_path, tmp_path / "model")
