"""Adapters in PEFT's format: what is written means the same by PEFT's own definition, and what PEFT writes is read."""

from __future__ import annotations

import json

import adapter_files as files
import numpy as np
import pytest
from adapter_files import BF16, EXPERTS, GPT_OSS, INTERMEDIATE, MIXTRAL, MODULE, QWEN, change, lora, numbers
from safetensors.numpy import load_file

from ktmoe.adapters import export_adapter, import_adapter
from ktmoe.errors import FormatError, OutputError
from ktmoe.training.lora import Lora

SUBSETS = [("gate", "up", "down"), ("gate", "up"), ("gate", "down"), ("up",), ("down",)]


def rows(projection: str, interleaved: bool) -> slice:
    if interleaved:
        return slice(int(projection == "up"), None, 2)
    return slice(INTERMEDIATE, None) if projection == "up" else slice(INTERMEDIATE)


def check_same(found: Lora, wanted: Lora) -> None:
    """The same numbers, in the same dtype."""
    assert (found.rank, found.scale, found.projections) == (wanted.rank, wanted.scale, wanted.projections)
    for projection, pair in wanted.pairs.items():
        for array, expected in zip(found.pairs[projection], pair, strict=True):
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("projections", SUBSETS)
@pytest.mark.parametrize("model", [QWEN, GPT_OSS])
def test_what_is_written_means_the_same(tmp_path, model, projections):
    """By PEFT's own definition, for each half of gate_up_proj; a half without an adapter gets zeros."""
    one = lora(projections, alpha=5.0)
    export_adapter(tmp_path, {0: one}, model)
    if "down" in projections:
        np.testing.assert_allclose(files.of_parameter(tmp_path, MODULE, "down_proj"), change(one, "down"), rtol=1e-12)
    if {"gate", "up"} & set(projections):
        both = files.of_parameter(tmp_path, MODULE, "gate_up_proj")
        for projection in ("gate", "up"):
            found = both[:, rows(projection, model is GPT_OSS)]
            np.testing.assert_allclose(found, change(one, projection), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("fused_experts", [True, False])
@pytest.mark.parametrize("projections", SUBSETS)
@pytest.mark.parametrize("model", [QWEN, GPT_OSS, MIXTRAL])
def test_there_and_back(tmp_path, model, projections, fused_experts):
    """Layers of other dtypes, ranks and alphas, with other projections."""
    loras = {
        3: lora(projections, dtype=BF16),
        0: lora(projections, rank=5, alpha=-0.3, seed=1),
        11: lora(("gate", "up", "down"), seed=2),
    }
    export_adapter(tmp_path, loras, model, fused_experts=fused_experts)
    found = import_adapter(tmp_path, model)
    assert list(found) == [0, 3, 11]
    for layer, wanted in loras.items():
        check_same(found[layer], wanted)


def test_mixed_dtypes(tmp_path):
    """What shares a tensor becomes float32, which has all numbers of bfloat16."""
    pairs = lora().pairs | {"up": tuple(array.astype(BF16) for array in lora(seed=1).pairs["up"])}
    export_adapter(tmp_path, {0: Lora(pairs, 2.0)}, QWEN)
    found = import_adapter(tmp_path, QWEN)[0]
    assert [array.dtype for array in found.pairs["up"]] == [np.float32] * 2
    for projection, pair in pairs.items():
        for array, expected in zip(found.pairs[projection], pair, strict=True):
            np.testing.assert_array_equal(numbers(array), numbers(expected))


def test_an_expert_s_modules(tmp_path):
    """Where each expert has modules of its own: plain A and B, and names by the model."""
    one = lora(("gate", "down"))
    export_adapter(tmp_path, {4: one}, MIXTRAL, modules="model.layers.{layer}.block_sparse_moe.experts", fused_experts=False)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    base = f"{files.PREFIX}model.layers.4.block_sparse_moe.experts"
    assert len(tensors) == 2 * 2 * EXPERTS
    np.testing.assert_array_equal(tensors[f"{base}.2.w1.lora_A.weight"], one.pairs["gate"][0][2])
    np.testing.assert_array_equal(tensors[f"{base}.1.w2.lora_B.weight"], one.pairs["down"][1][1])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_parameters"] is None
    assert (config["r"], config["lora_alpha"]) == (2, 6)


def test_the_smallest_config(tmp_path):
    """Patterns for what differs alone; the model's folder is named."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "granitemoe"}))
    export_adapter(tmp_path / "out", {0: lora(), 1: lora()}, tmp_path / "model")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    base = "model.layers.{}.block_sparse_moe.experts.{}"
    assert config["target_parameters"] == [base.format(n, p) for n in (0, 1) for p in ("gate_up_proj", "down_proj")]
    assert config["base_model_name_or_path"] == str(tmp_path / "model")
    assert (config["r"], config["lora_alpha"]) == (4, 12)
    down = [base.format(n, "down_proj").replace(".", r"\.") for n in (0, 1)]
    assert (config["rank_pattern"], config["alpha_pattern"]) == (dict.fromkeys(down, 2), dict.fromkeys(down, 6))
    assert config["target_modules"] == []
    assert config["lora_dropout"] == 0


def test_what_peft_trains(tmp_path):
    """One A for gate and up: both get all of it, and their own rows of B."""
    files.write(tmp_path, files.tensors_of(), lora_alpha=3)
    for model in (QWEN, GPT_OSS):
        found = import_adapter(tmp_path, model)[0]
        assert (found.rank, found.alpha, found.projections) == (2, 3, ("gate", "up", "down"))
        written = json.loads((tmp_path / "adapter_config.json").read_text())
        written["target_parameters"] = [f"{MODULE}.gate_up_proj", f"{MODULE}.down_proj"]
        (tmp_path / "adapter_config.json").write_text(json.dumps(written))
        both = files.of_parameter(tmp_path, MODULE, "gate_up_proj")
        for projection in ("gate", "up"):
            np.testing.assert_allclose(change(found, projection), both[:, rows(projection, model is GPT_OSS)], rtol=1e-12)
        np.testing.assert_allclose(change(found, "down"), files.of_parameter(tmp_path, MODULE, "down_proj"), rtol=1e-12)


def test_patterns_and_rslora(tmp_path):
    """Rank and alpha by the first pattern that fits; the smaller rank is filled with zeros, and a scale that is a power of two
    goes into B."""
    tensors = files.tensors_of() | {name: a for name, a in files.tensors_of(rank=8).items() if "base_layer" in name}
    names = [f"{MODULE}.gate_up_proj", f"{MODULE}.down_proj"]
    patterns = {"rank_pattern": {r"layers\.(0|5)\..*\.gate_up_proj": 8, r".*\.gate_up_proj": 77}}
    files.write(tmp_path, tensors, target_parameters=names, use_rslora=True, lora_alpha=3, **patterns)
    found = import_adapter(tmp_path, QWEN)[0]
    assert found.rank == 8
    assert found.scale == pytest.approx(3 / 8**0.5, rel=1e-15)
    both = files.of_parameter(tmp_path, MODULE, "gate_up_proj")
    np.testing.assert_allclose(change(found, "up"), both[:, INTERMEDIATE:], rtol=1e-12)
    np.testing.assert_allclose(change(found, "down"), files.of_parameter(tmp_path, MODULE, "down_proj"), rtol=1e-12)
    files.write(tmp_path, tensors, target_parameters=names, lora_alpha=3, alpha_pattern={"down_proj": 4}, **patterns)
    with pytest.raises(FormatError, match=r"down: expected alpha / rank of 0\.375, as the layer's first, .* found 2"):
        import_adapter(tmp_path, QWEN)


def test_numbers_that_a_factor_would_round(tmp_path):
    tensors = {name: array * np.float32(1e-38) for name, array in files.tensors_of().items()}
    files.write(tmp_path, tensors, alpha_pattern={"down_proj": 2.0**-10})
    with pytest.raises(FormatError, match="down: expected alpha / rank"):
        import_adapter(tmp_path, QWEN)


def test_an_adapter_before_training(tmp_path):
    """B is 0: nothing says which half of A is whose."""
    fresh = {p: (a, np.zeros_like(b)) for p, (a, b) in lora().pairs.items()}
    export_adapter(tmp_path, {0: Lora(fresh, 2.0)}, QWEN)
    found = import_adapter(tmp_path, QWEN)[0]
    assert (found.projections, found.rank, found.scale) == (("gate", "up", "down"), 4, 1.0)
    assert not any(b.any() for _, b in found.pairs.values())
    assert found.pairs["gate"][0] is not found.pairs["up"][0]
    assert not np.shares_memory(found.pairs["gate"][0], found.pairs["up"][0])


def test_float16(tmp_path):
    files.write(tmp_path, files.tensors_of(dtype=np.float16))
    found = import_adapter(tmp_path, QWEN)[0]
    expected = files.tensors_of(dtype=np.float16)[f"{files.PREFIX}{MODULE}.lora_A.weight"]
    assert found.pairs["down"][0].dtype == np.float32
    np.testing.assert_array_equal(found.pairs["down"][0].reshape(-1, INTERMEDIATE), expected)


def test_other_modules(tmp_path):
    """They are named, and left out if that is asked for."""
    other = {f"{files.PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight": np.ones((2, 4), np.float32)}
    files.write(tmp_path, files.tensors_of() | other)
    with pytest.raises(FormatError, match=r"found 1 other tensors, '.*q_proj.lora_A.weight' among them; experts_only=True"):
        import_adapter(tmp_path, QWEN)
    assert list(import_adapter(tmp_path, QWEN, experts_only=True)) == [0]
    files.write(tmp_path, other)
    with pytest.raises(FormatError, match="expected an adapter of routed experts, found none"):
        import_adapter(tmp_path, QWEN, experts_only=True)


def test_a_folder_that_has_an_adapter(tmp_path):
    export_adapter(tmp_path, {0: lora()}, QWEN)
    before = (tmp_path / "adapter_model.safetensors").read_bytes()
    with pytest.raises(OutputError, match="expected no adapter, found one"):
        export_adapter(tmp_path, {0: lora(seed=1)}, QWEN)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == before
    export_adapter(tmp_path, {1: lora(seed=1)}, QWEN, overwrite=True)
    check_same(import_adapter(tmp_path, QWEN)[1], lora(seed=1))
    with pytest.raises(OutputError, match="found embedded null byte"):
        export_adapter("a\0b", {0: lora()}, QWEN)
    with pytest.raises(OutputError, match="expected a folder that can be written"):
        export_adapter(tmp_path / "adapter_config.json", {0: lora()}, QWEN)


def test_names_of_a_model_with_a_text_model(tmp_path):
    """A name that is given is used as it is; a reader takes any."""
    modules = "model.language_model.layers.{layer}.mlp.experts"
    model = {"model_type": "qwen3_vl_moe", "text_config": {}}
    export_adapter(tmp_path, {7: lora()}, model, modules=modules)
    names = load_file(tmp_path / "adapter_model.safetensors").keys()
    assert all(name.startswith("base_model.model.model.language_model.layers.7.mlp.experts.") for name in names)
    check_same(import_adapter(tmp_path, model)[7], lora())
