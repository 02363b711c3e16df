"""Adapters in PEFT's format: files that are malformed, that do not fit each other, or that experts cannot have are refused."""

from __future__ import annotations

import json

import adapter_files as files
import numpy as np
import pytest
from adapter_files import MODULE, QWEN, lora
from safetensors.numpy import load_file, save_file

from ktmoe.adapters import export_adapter, import_adapter
from ktmoe.errors import CheckpointError, FormatError, InputError, KtmoeError

INNER, OUTER = f"{files.PREFIX}{MODULE}.base_layer.lora", f"{files.PREFIX}{MODULE}.lora"
F32 = np.float32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout: experts have none, as in PEFT, found 0.1"),
        ({"use_dora": True}, "use_dora: expected False for experts, found True"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias: expected 'none', found 'all'"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' changes the model's own weights"),
        ({"peft_type": "ADALORA"}, "peft_type: expected 'LORA', found 'ADALORA'"),
        ({"peft_version": "0.18.1"}, "peft_version: expected 0.19 or newer"),
        ({"peft_version": None}, "peft_version: expected 0.19 or newer"),
        ({"peft_version": "x" * 999}, "peft_version"),
        ({"lora_dropout": "x"}, "lora_dropout: expected a number"),
        ({"lora_dropout": float("nan")}, "lora_dropout: expected a number"),
        ({"r": 0}, "r: expected a rank of at least 1, found 0"),
        ({"r": True}, "r: expected a rank"),
        ({"r": 4}, r"expected lora_A \[experts \* 4, inputs\]"),
        ({"lora_alpha": "x"}, "lora_alpha: expected a finite number"),
        ({"lora_alpha": float("inf")}, "lora_alpha: expected a finite number"),
        ({"lora_alpha": 1e-320, "alpha_pattern": {"down_proj": 1e290}}, "expected alpha / rank"),
        ({"use_rslora": "x"}, "use_rslora"),
        ({"rank_pattern": ["x"]}, "rank_pattern: expected an object"),
        ({"rank_pattern": {"(a+)+b": 2}}, "rank_pattern: expected names of parameters"),
        ({"rank_pattern": {".*.*.*.*x": 2}}, "rank_pattern: expected names of parameters"),
        ({"rank_pattern": {"(a": 2}}, "rank_pattern: expected"),
        ({"alpha_pattern": {"x" * 1001: 2}}, "alpha_pattern: expected patterns of at most"),
        ({"target_parameters": "experts"}, "target_parameters: expected a list"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "found 2 of them"),
        ({"target_parameters": None}, "found 2 of them"),
        ({"lora_alpha": 0}, None),
    ],
)
def test_configs(tmp_path, config, message):
    files.write(tmp_path, files.tensors_of(), **config)
    if message is None:
        assert import_adapter(tmp_path, QWEN)[0].scale == 0
        return
    with pytest.raises((FormatError, CheckpointError), match=message):
        import_adapter(tmp_path, QWEN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{OUTER}_A.weight": None}, "expected lora_A and lora_B, found one of both"),
        ({f"{OUTER}_A.weight": None, f"{OUTER}_B.weight": None}, "nested where there are two, found 1 of them"),
        ({f"{INNER}_A.weight": None, f"{INNER}_B.weight": None}, "found 1 of them"),
        ({f"{OUTER}_A.weight": np.ones((7, 6), F32)}, r"expected lora_A \[experts \* 2, inputs\]"),
        ({f"{OUTER}_B.weight": np.ones((10, 4), F32)}, r"down_proj: expected lora_A"),
        ({f"{OUTER}_A.weight": np.ones(6, F32)}, "expected two dimensions above 0"),
        ({f"{OUTER}_A.weight": np.ones((6, 0), F32)}, "expected two dimensions above 0"),
        ({f"{OUTER}_A.weight": np.ones((6, 6), np.int32)}, "dtype: expected F32 or BF16 or F16, found I32"),
        ({f"{OUTER}_A.weight": np.full((6, 6), np.nan, F32)}, "must be finite, found nan"),
        ({f"{INNER}_B.weight": np.full((12, 6), 0x7F800001, np.uint32).view(F32)}, "must be finite, found nan"),
        ({f"{OUTER}_A.weight": np.ones((6, 7), F32)}, r"expected \[experts, intermediate, hidden\] alike"),
        ({f"{OUTER}_A.weight": np.ones((4, 6), F32), f"{OUTER}_B.weight": np.ones((10, 4), F32)}, "alike, found gate"),
        ({f"{INNER}_B.weight": np.ones((13, 6), F32)}, "expected an even number of outputs, found 13"),
        (
            {f"{files.PREFIX}{MODULE}.base_layer.base_layer.lora_A.weight": np.ones((6, 6), F32)},
            "expected lora_A and lora_B of",
        ),
        ({f"{files.PREFIX}{MODULE}.lora_magnitude_vector": np.ones((6, 6), F32)}, "expected lora_A and lora_B of"),
        ({f"{files.PREFIX}model.layers.0.other.experts.lora_A.weight": np.ones((6, 6), F32)}, "one module of experts"),
        ({f"{files.PREFIX}{MODULE}.0.gate_proj.lora_A.weight": np.ones((2, 10), F32)}, "found both"),
        (
            {f"{files.PREFIX}{'m' * 65}.layers.1.mlp.experts.lora_A.weight": np.ones((6, 6), F32)},
            "expected lora_A and lora_B of",
        ),
    ],
)
def test_tensors(tmp_path, changes, message):
    tensors = {name: array for name, array in (files.tensors_of() | changes).items() if array is not None}
    files.write(tmp_path, tensors)
    with pytest.raises((FormatError, CheckpointError), match=message):
        import_adapter(tmp_path, QWEN)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("1.gate_proj.lora_A.weight", None, "expected lora_A and lora_B, found one"),
        ("3.gate_proj.lora_A.weight", np.ones((2, 10), F32), "found one"),
        (
            "7.gate_proj.lora_A.weight",
            np.ones((2, 10), F32),
            "gate_proj: expected an adapter of every expert, found none of expert 3",
        ),
        ("1.gate_proj.lora_A.weight", np.ones((2, 9), F32), "expected shape and dtype of expert 0"),
        ("1.w1.lora_A.weight", np.ones((2, 10), F32), "expected modules gate_proj, up_proj, down_proj, found 'w1'"),
    ],
)
def test_tensors_of_modules(tmp_path, name, array, message):
    export_adapter(tmp_path, {0: lora()}, QWEN, fused_experts=False)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors[f"{files.PREFIX}{MODULE}.{name}"] = array
    save_file({name: array for name, array in tensors.items() if array is not None}, tmp_path / "adapter_model.safetensors")
    with pytest.raises((FormatError, CheckpointError), match=message):
        import_adapter(tmp_path, QWEN)


def test_ranks_of_modules(tmp_path):
    """Those of the config must be those of the tensors, and one for all experts of a layer."""
    export_adapter(tmp_path, {0: lora()}, QWEN, fused_experts=False)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for changes, message in (
        ({"r": 3}, "gate_proj: expected lora_A and lora_B of rank 3"),
        ({"alpha_pattern": {r"experts\.1\.up_proj": 9}}, "up_proj: expected one rank and alpha for all, found others in 1"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | changes))
        with pytest.raises((FormatError, CheckpointError), match=message):
            import_adapter(tmp_path, QWEN)


def test_damaged_files(tmp_path):
    """Every shorter file, and files that are not there: a clear error."""
    files.write(tmp_path, files.tensors_of())
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        whole = (tmp_path / name).read_bytes()
        for size in range(0, len(whole) - 1, max(1, len(whole) // 40)):
            (tmp_path / name).write_bytes(whole[:size])
            with pytest.raises(KtmoeError, match=name):
                import_adapter(tmp_path, QWEN)
        (tmp_path / name).unlink()
        with pytest.raises(CheckpointError, match=name):
            import_adapter(tmp_path, QWEN)
        (tmp_path / name).write_bytes(whole)
    assert import_adapter(tmp_path, QWEN)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loras": {}}, "loras: expected"),
        ({"loras": {"mtp.0": lora()}}, "expected numbers of layers"),
        ({"loras": {-1: lora()}}, "expected numbers of layers"),
        ({"loras": {0: None}}, "layer 0: expected a Lora, found NoneType"),
        ({"loras": {0: lora(dtype=np.float64)}}, "layer 0: lora must be of float32 or bfloat16, found float64"),
        ({"model": {}}, "model_type"),
        ({"model": {"model_type": "llama4_text"}}, "takes inputs of llama4_text's experts for outputs"),
        ({"model": {"model_type": "qwen3_vl_moe", "text_config": {}}}, "modules: the classes of 'qwen3_vl_moe'"),
        ({"modules": "model.layers"}, "modules: expected a name with"),
        ({"modules": "model.layers.{layer}.(x+)+"}, "modules: expected a name with"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    with pytest.raises(InputError, match=message):
        export_adapter(tmp_path / "out", **({"loras": {0: lora()}, "model": QWEN} | arguments))
    assert not (tmp_path / "out").exists()


def test_a_signalling_nan_behind_another_alpha(tmp_path):
    """It is refused without a warning, whatever multiplies it."""
    tensors = files.tensors_of()
    tensors[f"{OUTER}_B.weight"] = np.full((10, 6), 0x7F800001, np.uint32).view(F32)
    folder = files.write(tmp_path / "adapter", tensors, alpha_pattern={"mlp.experts.down_proj": 16})
    with pytest.raises(FormatError, match="expected alpha / rank of"):
        import_adapter(folder, QWEN)
