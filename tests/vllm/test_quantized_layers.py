"""Layers of quantized experts: what vLLM makes and fills is what ktmoe's own loader reads from the same tensors."""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import dataclass, field

import checkpoints
import numpy as np
import pytest
from helpers import assert_right, random_batch, same_bits

import ktmoe
import ktmoe.vllm
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.layer import MoELayer

NAME = "model.layers.0"


def compressed(form: str, inputs: dict | None = None, **weights) -> dict:
    """What config.json says of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


_W1 = {"ckpt_names": ("w1", "w2", "w3")}
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


QUARK = {
    "quant_method": "quark",
    "export": {"kv_cache_group": [], "pack_method": "reorder"},
    "exclude": ["lm_head"],
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "global_quant_config": {
        "weight": {
            "dtype": "fp4",
            "qscheme": "per_group",
            "group_size": 32,
            "is_dynamic": False,
            "scale_format": "e8m0",
            "ch_axis": -1,
        },
        "input_tensors": None,
        "output_tensors": None,
        "bias": None,
    },
}


@dataclass(frozen=True)
class Case:
    """scheme: of checkpoints.SCHEMES. quantization: vLLM's name of it. stated: config.json's. method: vLLM's class.

    endings: what vLLM's model renames. arguments: of the layer. model: what else config.json says that vLLM looks at.
    """

    scheme: str
    quantization: str
    stated: dict
    method: str
    endings: dict = field(default_factory=dict)
    arguments: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)


_V4 = {".scale": ".weight_scale"}
_V4_BASE = {".scale": ".weight_scale_inv"}
_GPT_OSS = {"activation": "swigluoai", "has_bias": True}
_WNA16 = "CompressedTensorsWNA16MoEMethod"
CASES = {
    "gpt-oss": Case("gpt_oss", "gpt_oss_mxfp4", {}, "GptOssMxfp4MoEMethod", {}, _GPT_OSS),
    "DeepSeek-V4": Case("deepseek_v4", "deepseek_v4_fp8", _BLOCKS, "Mxfp4MoEMethod", _V4, {**_W1, "swiglu_limit": 10.0}),
    "MXFP4": Case(
        "mxfp4 packed",
        "compressed-tensors",
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        "CompressedTensorsW4A4Mxfp4MoEMethod",
        {},
        _W1,
    ),
    "MXFP4 by Quark": Case("mxfp4 quark", "quark", QUARK, "QuarkOCP_MX_MoEMethod"),
    "MXFP8": Case("mxfp8 weight_scale", "mxfp8", {"quant_method": "mxfp8"}, "ModelOptMxFp8FusedMoE"),
    "MXFP8 by compressed-tensors": Case(
        "mxfp8 weight_scale",
        "compressed-tensors",
        compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"),
        "CompressedTensorsW8A8Mxfp8MoEMethod",
    ),
    "FP8": Case("fp8", "fp8", _BLOCKS, "Fp8MoEMethod"),
    "FP8, bf16 scales": Case("fp8 bf16", "fp8", _BLOCKS, "Fp8MoEMethod"),
    "DeepSeek-V4 base": Case(
        "deepseek_v4 base", "deepseek_v4_fp8", _BLOCKS, "Fp8MoEMethod", _V4_BASE, _W1, {"expert_dtype": "fp8"}
    ),
    "MXFP4 by its vLLM name": Case("mxfp4 quark", "mxfp4", {}, "Mxfp4MoEMethod"),
    "FP8 per matrix": Case("fp8 per matrix", "fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}, "Fp8MoEMethod"),
    "FP8 of blocks by compressed-tensors": Case(
        "fp8 weight_scale",
        "compressed-tensors",
        compressed("float-quantized", _TOKENS, num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        "CompressedTensorsW8A8Fp8MoEMethod",
    ),
    "FP8 per row": Case(
        "fp8 per row",
        "compressed-tensors",
        compressed("float-quantized", _TOKENS, num_bits=8, type="float", strategy="channel"),
        "CompressedTensorsW8A8Fp8MoEMethod",
    ),
    "FP8 per matrix by compressed-tensors": Case(
        "fp8 per matrix",
        "compressed-tensors",
        compressed("float-quantized", _TENSOR, num_bits=8, type="float", strategy="tensor"),
        "CompressedTensorsW8A8Fp8MoEMethod",
    ),
    "FP8 by ModelOpt": Case(
        "fp8 per matrix", "modelopt", {"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOptFp8MoEMethod"
    ),
    "INT4": Case("int4", "compressed-tensors", compressed("pack-quantized", **_INT4), _WNA16),
    "INT4, zero points": Case(
        "int4 zero points", "compressed-tensors", compressed("pack-quantized", **_INT4, symmetric=False), _WNA16
    ),
    "INT4 per row": Case(
        "int4 per row", "compressed-tensors", compressed("pack-quantized", num_bits=4, type="int", strategy="channel"), _WNA16
    ),
    "INT8": Case("int8 packed", "compressed-tensors", compressed("pack-quantized", **{**_INT4, "num_bits": 8}), _WNA16),
    "INT8 per row": Case(
        "int8 packed per row",
        "compressed-tensors",
        compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
        _WNA16,
    ),
    "GPTQ": Case(
        "gptq",
        "gptq",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        "AutoGPTQMoEMethod",
    ),
    "AWQ": Case(
        "awq",
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        "AutoAWQMoEMethod",
    ),
    "NVFP4": Case(
        "nvfp4",
        "modelopt_fp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": {"weights": {"group_size": 16}}}},
        "ModelOptNvFp4FusedMoE",
    ),
    "NVFP4 by compressed-tensors": Case(
        "nvfp4 divided",
        "compressed-tensors",
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        "CompressedTensorsW4A4Nvfp4MoEMethod",
    ),
}


@pytest.fixture
def layers(tmp_path_factory):
    """layers_of_vllm, in a process that vLLM's layers can be made in."""
    import layers_of_vllm  # not before: it warns

    ktmoe.vllm.register()
    with layers_of_vllm.vllm_is_set_up(tmp_path_factory.getbasetemp()):
        yield layers_of_vllm


def filled(layers, case: Case, tensors: checkpoints.Tensors, hidden: int, intermediate: int):
    """A layer that vLLM has filled with a checkpoint's tensors, and not processed."""
    scheme = checkpoints.SCHEMES[case.scheme]
    base = f"{NAME}.{scheme.module}"
    layers.model_says(**case.model)
    config = layers.quantization(case.quantization, case.stated)
    layer = layers.make(config, checkpoints.EXPERTS, hidden, intermediate, base, **case.arguments)
    read = {name.removeprefix(f"{base}."): layers.tensor(*tensor) for name, tensor in tensors.items()}
    if case.scheme == "gpt_oss":
        fill_gpt_oss(layer, read)
        return layer
    read = {name: each for name, each in read.items() if not name.endswith("g_idx")}  # vLLM's models leave them out
    for old, new in case.endings.items():
        read = {name.removesuffix(old) + new if name.endswith(old) else name: each for name, each in read.items()}
    loaded = set(layer.load_weights(iter(read.items())))
    missing = {name for name, _ in layer.named_parameters()} - loaded
    assert all("input" in name or name.endswith(("bias", "weight_shape")) for name in missing)  # a checkpoint may lack them
    return layer


def fill_gpt_oss(layer, read) -> None:
    """As vLLM's model does, which names all experts at once."""
    for stem, parameter in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        for ending, kind in (("_blocks", "_weight"), ("_scales", "_weight_scale"), ("_bias", "_bias")):
            stored = read[stem + ending].flatten(2) if ending == "_blocks" else read[stem + ending]
            target = getattr(layer, parameter + kind)
            target.weight_loader(target, stored, weight_name=parameter + kind, shard_id=None, expert_id=None)


def sane(tensors: checkpoints.Tensors) -> checkpoints.Tensors:
    """With scales of powers of two near 1, so that outputs are finite."""
    made = {}
    for name, (dtype, array) in tensors.items():
        powers = "scale" in name and array.dtype == np.uint8 and dtype in ("U8", "F8_E8M0")
        made[name] = [dtype, (array % 8 + 118).astype(np.uint8) if powers else array]
    return made


def config_of(case: Case) -> dict:
    """A checkpoint's config.json, for ktmoe's own loader."""
    model = {"gpt_oss": {"model_type": "gpt_oss"}, "deepseek_v4": {"swiglu_limit": 10.0}}.get(case.scheme, {})
    count = checkpoints.SCHEMES[case.scheme].count
    return {count: checkpoints.EXPERTS, "hidden_act": "silu", "quantization_config": case.stated, **model}


@pytest.mark.parametrize("label", CASES)
def test_every_format(layers, tmp_path, label):
    """Every number is the checkpoint's. Outputs have the bits of ktmoe's own loader, within their bound. No copy is left."""
    case = CASES[label]
    scheme = checkpoints.SCHEMES[case.scheme]
    hidden, intermediate = (256, 128) if "fp8" in case.scheme or "base" in case.scheme else (96, 64)
    tensors = sane(scheme.layer(NAME, hidden=hidden, intermediate=intermediate))
    layer = filled(layers, case, tensors, hidden, intermediate)
    method = layer.quant_method
    assert type(method).__name__ == case.method
    experts = layers.experts(layer)
    for expert in range(checkpoints.EXPERTS):
        for projection in PROJECTIONS:
            meaning = scheme.meaning(tensors, f"{NAME}.{scheme.module}", expert, projection)
            checkpoints.check_matrix(experts.matrix(expert, projection), *meaning)

    checkpoints.write(tmp_path, tensors, config_of(case))
    own = ktmoe.load_experts(tmp_path, 0)
    assert own.activation == experts.activation
    x, ids, weights = random_batch(np.random.default_rng(1), own, 9, 2, checkpoints.BF16)
    method.process_weights_after_loading(layer)
    y = layers.apply(layer, x, ids, weights)
    with MoELayer(own) as loaded:
        assert same_bits(y, loaded.forward(x, ids, weights))
    assert_right(method.packed, own, x, ids, weights, y)
    assert not sum(parameter.numel() for parameter in layer.parameters())


#: What ktmoe does not read -> (vLLM's name of it, config.json's, what the log says).
LEFT = {
    "INT8, zero points": (
        "compressed-tensors",
        compressed("pack-quantized", **{**_INT4, "num_bits": 8, "symmetric": False}),
        "found int of 8 bits by group, asymmetric, in format pack-quantized",
    ),
    "INT8 with INT8 activations": (
        "compressed-tensors",
        compressed("int-quantized", {**_TOKENS, "type": "int"}, num_bits=8, type="int", strategy="channel"),
        "found int of 8 bits by channel, symmetric, in format int-quantized",
    ),
    "GPTQ of 8 bits": (
        "gptq",
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": True},
        "expected GPTQ of 4 bits, found 8",
    ),
}


@pytest.mark.parametrize("label", LEFT)
def test_what_is_left_to_vllm(layers, caplog, label):
    """One line, however many layers there are; then vLLM's own error, where it has no kernel for this CPU."""
    name, stated, reason = LEFT[label]
    for number in range(2):
        layer = None
        with suppress(ValueError, NotImplementedError):  # vLLM has no kernel for this CPU
            layer = layers.make(layers.quantization(name, stated), 2, 64, 64, f"model.layers.{number}.mlp.experts")
        assert layer is None or not layers.ours(layer)
    lines = [record.getMessage() for record in caplog.records if record.name == "vllm.ktmoe"]
    assert len(lines) == 1
    assert reason in lines[0]
    assert "model.layers.0.mlp.experts" in lines[0]


def test_a_format_without_kernels(layers, caplog):
    """Blocks of 32x32 are read, and not computed: the log says it before vLLM's own error comes."""
    stated = _BLOCKS | {"weight_block_size": [32, 32]}
    layer = layers.make(layers.quantization("fp8", stated), 2, 64, 64, f"{NAME}.mlp.experts")
    for parameter in layer.parameters():
        parameter.data.zero_()
    if layers.has_kernel(layer):
        pytest.skip("vLLM has a kernel for FP8 on this CPU")
    with pytest.raises((NotImplementedError, ValueError), match="backend"):
        layer.quant_method.process_weights_after_loading(layer)
    [line] = [record.getMessage() for record in caplog.records if record.name == "vllm.ktmoe"]
    assert "32x32" in line


def test_other_processes_get_these_configs(layers):
    """vLLM pickles its config for the process that runs a model."""
    for name, stated in {case.quantization: case.stated for case in CASES.values()}.items():
        config = layers.quantization(name, stated)
        assert type(config).__module__ == "ktmoe.vllm.quantized_configs"
        assert type(pickle.loads(pickle.dumps(config))) is type(config)


def test_layers_that_are_not_quantized(layers):
    """A layer that a checkpoint names as such is bfloat16's, whose class is not one of these."""
    stated = _BLOCKS | {"modules_to_not_convert": [f"{NAME}.mlp.experts"]}
    layer = layers.make(layers.quantization("fp8", stated), 2, 128, 128, f"{NAME}.mlp.experts")
    assert layer.w13_weight.dtype == layer.params_dtype
    assert "Unquantized" in type(layer.quant_method).__name__


def test_scales_of_other_dtypes_are_kept(layers):
    """vLLM would round float16 scales to the model's bfloat16; what both dtypes lack is refused."""
    case = CASES["INT4"]
    tensors = checkpoints.SCHEMES["int4"].layer(NAME)
    for tensor in tensors.values():
        if tensor[0] == "BF16":
            tensor[:] = "F16", tensor[1].astype(np.float16) + np.float16(2**-14)
    layer = filled(layers, case, tensors, 96, 64)
    found = layers.experts(layer)
    assert found.formats["gate"].scale.kind == "fp16"
    stored = tensors[f"{NAME}.mlp.experts.1.up_proj.weight_scale"][1]
    np.testing.assert_array_equal(found.matrix(1, "up").scales, stored)
    layer.w2_weight_scale.data[0, 0, 0] = 1 + 2.0**-20
    with pytest.raises(FormatError, match="weight_scale: expected scales that are all bf16 or all fp16 numbers"):
        layers.experts(layer)


def test_a_part_of_each_expert(layers):
    """Tensor parallelism: the first of two processes has 64 of 96 rows, as vLLM pads what has whole groups of 32."""
    case, tensors = CASES["gpt-oss"], sane(checkpoints.SCHEMES["gpt_oss"].layer(NAME, hidden=96, intermediate=96))
    config = layers.quantization(case.quantization, case.stated)
    layer = layers.make(config, checkpoints.EXPERTS, 96, 96, f"{NAME}.mlp.experts", tp_size=2, **case.arguments)
    assert layer.intermediate_size_per_partition == 64
    part = {
        name: [dtype, array[:, :128] if "gate_up" in name else array[:, :, :2] if "bias" not in name else array]
        for name, (dtype, array) in tensors.items()
    }
    fill_gpt_oss(layer, {name.rpartition("experts.")[2]: layers.tensor(*tensor) for name, tensor in part.items()})
    experts = layers.experts(layer)
    for projection in PROJECTIONS:
        weights, bias = checkpoints.SCHEMES["gpt_oss"].meaning(tensors, f"{NAME}.mlp.experts", 1, projection)
        rows, columns = (96, 64) if projection == "down" else (64, 96)
        checkpoints.check_matrix(experts.matrix(1, projection), weights[:rows, :columns], bias[:rows])
