"""What the loaders' tests share: small checkpoints of every naming scheme, and what their tensors mean, by the definitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import integer_checkpoints as integers
import ml_dtypes
import numpy as np
import stacked_checkpoints as stacked
from integer_checkpoints import AWQ_PLACES, along_k, along_n, factors
from safetensors import TensorSpec, serialize_file

from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.loaders.base import explain
from ktmoe.loaders.checkpoint import INDEX_NAME, Checkpoint
from ktmoe.matrix import Matrix

HIDDEN, INTERMEDIATE, EXPERTS = 96, 64, 3
BF16 = np.dtype(ml_dtypes.bfloat16)
PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W = {"gate": "w1", "up": "w3", "down": "w2"}
# how safetensors' writer calls a dtype, and its bytes per element
WRITER = {
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "F4": ("float4_e2m1fn_x2", 1),  # whose shape the writer takes in bytes
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "F32": ("float32", 4),
    "I16": ("int16", 2),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
}

#: name -> [dtype, array]; the header's shape is the array's, in elements of dtype.
Tensors = dict[str, list]


def zeros(dtype, *shape) -> list:
    """A tensor; shape in elements (of F4: in bytes)."""
    return [dtype, np.zeros((*shape[:-1], shape[-1] * WRITER[dtype][1]), np.uint8)]


def write(folder, tensors: Tensors, config: dict | None = None, file="model.safetensors") -> Checkpoint:
    specs = {}
    for name, (dtype, array) in tensors.items():
        writer, size = WRITER[dtype]
        shape = [*array.shape[:-1], array.shape[-1] * array.itemsize // size] if array.shape else []
        specs[name] = TensorSpec(dtype=writer, shape=shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
    serialize_file(specs, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(folder)


def scores(checkpoint: Checkpoint) -> dict[str, float]:
    """How sure every loader is of a checkpoint, by its name."""
    return {finding.loader: finding.score for finding in explain(checkpoint)}


def write_index(folder, weight_map: dict[str, str]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def shape_of(projection, hidden=HIDDEN, intermediate=INTERMEDIATE) -> tuple[int, int]:
    return (hidden, intermediate) if projection == "down" else (intermediate, hidden)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """[..., k/2] -> [..., k], low nibble = even k."""
    return np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)


def mxfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [n, k/2] and [n, k/32] as real numbers, by ml_dtypes."""
    weights = nibbles(codes).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return weights * np.repeat(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, 1)


def numbers(matrix: Matrix) -> np.ndarray:
    """What a Matrix stands for, float64 [n, k]: its own arrays, by what its format says."""
    weight_format, (n, k) = matrix.format, matrix.shape
    if weight_format.family == "b16":
        return (matrix.codes if weight_format.order.name == "rows" else matrix.codes.T).astype(np.float64)
    order, codes, scales, zeros = weight_format.order.name, matrix.codes, matrix.scales, matrix.offsets
    if order == "rows":
        codes = nibbles(codes) if weight_format.family == "q4" else codes
    elif order == "transposed":
        codes, scales = codes.T, None if scales is None else scales.T
    else:
        codes = (along_k(codes) if order == "gptq" else along_n(codes, AWQ_PLACES)).T
        zeros = None if zeros is None else along_n(zeros, range(8) if order == "gptq" else AWQ_PLACES).T
        scales = None if scales is None else scales.T
    found = np.array([np.nan if value is None else value for value in weight_format.element.values])[codes]
    assert found.shape == (n, k)
    if zeros is not None:
        found = found - np.repeat((zeros + weight_format.offset.plus) % 16, weight_format.offset.extent[1], 1)[:, :k]
    if scales is not None:
        views = {"ue8m0": ml_dtypes.float8_e8m0fnu, "e4m3": ml_dtypes.float8_e4m3fn}
        kind, (rows, columns) = weight_format.scale.kind, weight_format.scale.extent
        scales = (scales.view(views[kind]) if kind in views else scales).astype(np.float64)
        found = found * scales.repeat(rows, 0)[:n].repeat(columns, 1)[:, :k]
    if matrix.factor is not None:
        factor = matrix.factor.astype(np.float64)[:, None]
        found = found / factor if weight_format.factor.divides else found * factor
    return found


# What each scheme's tensors are, and what they mean: (weights float64 [n, k], bias float32 [n] or None).


@dataclass(frozen=True)
class Scheme:
    """loader: its name. module: between layer and tensors. count: config.json's key for the number of experts.

    tensors: (base, random, hidden, intermediate) -> one layer's. meaning: (tensors, base, expert, projection).
    config: what config.json has to say.
    """

    loader: str
    module: str
    count: str
    tensors: Callable[..., Tensors]
    meaning: Callable[[Tensors, str, int, str], tuple[np.ndarray, np.ndarray | None]]
    stacked: bool = False
    intermediate: int = INTERMEDIATE

    def layer(self, layer: str, seed=0, hidden=HIDDEN, intermediate=None) -> Tensors:
        """layer: such as "model.layers.0"."""
        return self.tensors(f"{layer}.{self.module}", np.random.default_rng(seed), hidden, intermediate or self.intermediate)

    def check(self, weights: ExpertWeights, tensors: Tensors, layer: str) -> None:
        """Every matrix stands for the numbers that went in."""
        base = f"{layer}.{self.module}"
        assert weights.name == base
        assert (weights.num_experts, weights.hidden, weights.intermediate) == (EXPERTS, HIDDEN, self.intermediate)
        for expert in reversed(range(EXPERTS)):
            for projection in PROJECTIONS:
                check_matrix(weights.matrix(expert, projection), *self.meaning(tensors, base, expert, projection))


def check_matrix(matrix: Matrix, weights: np.ndarray, bias: np.ndarray | None) -> None:
    """A Matrix stands for these numbers, by what its format says."""
    found = numbers(matrix)
    np.testing.assert_array_equal(found, weights)
    if bias is None:
        assert matrix.bias is None
    else:
        np.testing.assert_array_equal(matrix.bias, bias)


def each(stems, hidden, intermediate):
    for expert in range(EXPERTS):
        for projection, stem in stems.items():
            yield f"{expert}.{stem}", *shape_of(projection, hidden, intermediate)


def _scale_bytes(random, *shape):
    return random.integers(0, 255, shape, np.uint8)  # all but 255, which is NaN


def all_in_one(loader, make, module="mlp.experts", count="num_experts", intermediate=INTERMEDIATE, **other) -> Scheme:
    """make, other: stacked()'s of tests/stacked_checkpoints.py."""
    return Scheme(loader, module, count, *stacked.stacked(make, **other), stacked=True, intermediate=intermediate)


def per_expert(loader, make, meaning, stems=PROJ, module="mlp.experts", count="num_experts") -> Scheme:
    """make: (random, n, k) -> {ending: tensor} of one matrix. meaning: what these stand for, by {ending: array}."""

    def tensors(base, random, hidden, intermediate):
        made = ((name, make(random, n, k)) for name, n, k in each(stems, hidden, intermediate))
        return {f"{base}.{name}{ending}": tensor for name, matrix in made for ending, tensor in matrix.items()}

    def numbers_of(tensors, base, expert, projection):
        name = f"{base}.{expert}.{stems[projection]}"
        arrays = {each.removeprefix(name): array for each, (_, array) in tensors.items() if each.startswith(f"{name}.")}
        return meaning(arrays), None

    return Scheme(loader, module, count, tensors, numbers_of)


def _deepseek_v4(base, random, hidden, intermediate):
    tensors = {}
    for name, n, k in each(W, hidden, intermediate):
        tensors[f"{base}.{name}.weight"] = ["I8", random.integers(0, 256, (n, k // 2), np.uint8)]
        tensors[f"{base}.{name}.scale"] = ["F8_E8M0", _scale_bytes(random, n, k // 32)]
    return tensors


def _deepseek_v4_meaning(tensors, base, expert, projection):
    name = f"{base}.{expert}.{W[projection]}"
    return mxfp4(tensors[f"{name}.weight"][1], tensors[f"{name}.scale"][1]), None


def e4m3(random, *shape) -> np.ndarray:
    """Bytes of every E4M3 number, and no NaN."""
    codes = random.integers(0, 256, shape, np.uint8)
    return np.where(codes & 127 == 127, np.uint8(0), codes)


def blocks(codes: np.ndarray, scales: np.ndarray, size=128) -> np.ndarray:
    """E4M3 with one scale per size x size, as real numbers."""
    n, k = codes.shape
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales.repeat(size, 0)[:n].repeat(size, 1)[:, :k]


def _flash_base(base, random, hidden, intermediate):
    tensors = {}
    for name, n, k in each(W, hidden, intermediate):
        tensors[f"{base}.{name}.weight"] = ["F8_E4M3", e4m3(random, n, k)]
        tensors[f"{base}.{name}.scale"] = ["F8_E8M0", _scale_bytes(random, -(-n // 128), -(-k // 128))]
    return tensors


def _flash_base_meaning(tensors, base, expert, projection):
    name = f"{base}.{expert}.{W[projection]}"
    scales = tensors[f"{name}.scale"][1].view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return blocks(tensors[f"{name}.weight"][1], scales), None


def _gpt_oss(base, random, hidden, intermediate):
    tensors = {}
    for stem, n, k in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
        tensors[f"{base}.{stem}_blocks"] = ["U8", random.integers(0, 256, (EXPERTS, n, k // 32, 16), np.uint8)]
        tensors[f"{base}.{stem}_scales"] = ["U8", _scale_bytes(random, EXPERTS, n, k // 32)]
        tensors[f"{base}.{stem}_bias"] = ["BF16", random.standard_normal((EXPERTS, n)).astype(BF16)]
    return tensors


def _gpt_oss_meaning(tensors, base, expert, projection):
    name = f"{base}.{'down_proj' if projection == 'down' else 'gate_up_proj'}"
    rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[projection]
    blocks, scales = tensors[f"{name}_blocks"][1][expert, rows], tensors[f"{name}_scales"][1][expert, rows]
    weights = mxfp4(blocks.reshape(len(blocks), -1), scales)
    bias = tensors.get(f"{name}_bias")
    return weights, None if bias is None else bias[1][expert, rows].astype(np.float32)


def int4(stems, group=32, shape_dtype="I32"):
    """tensors of compressed-tensors' pack-quantized."""

    def tensors(base, random, hidden, intermediate):
        made = {}
        for name, n, k in each(stems, hidden, intermediate):
            packed = random.integers(-(2**31), 2**31, (n, k // 8), np.int32)
            made[f"{base}.{name}.weight_packed"] = ["I32", packed]
            made[f"{base}.{name}.weight_scale"] = ["BF16", random.uniform(0.01, 0.1, (n, -(-k // group))).astype(BF16)]
            made[f"{base}.{name}.weight_shape"] = [shape_dtype, np.array([n, k], f"<i{WRITER[shape_dtype][1]}")]
        return made

    return tensors


def int4_meaning(stems, group=32):
    def meaning(tensors, base, expert, projection):
        name = f"{base}.{expert}.{stems[projection]}"
        packed, scales = tensors[f"{name}.weight_packed"][1], tensors[f"{name}.weight_scale"][1].astype(np.float64)
        codes = packed.astype(np.int64)[..., None] >> 4 * np.arange(8) & 15
        q = codes.reshape(len(packed), -1) - 8
        return q * np.repeat(scales, group, 1)[:, : q.shape[1]], None

    return meaning


def _bf16(stems):
    def tensors(base, random, hidden, intermediate):
        return {
            f"{base}.{name}.weight": ["BF16", random.standard_normal((n, k)).astype(BF16)]
            for name, n, k in each(stems, hidden, intermediate)
        }

    return tensors


def _bf16_meaning(stems):
    return lambda tensors, base, expert, projection: (
        tensors[f"{base}.{expert}.{stems[projection]}.weight"][1].astype(np.float64),
        None,
    )


def fp8(ending, dtype, size=128):
    """Tensors of FP8 with a scale per block."""

    def make(random, n, k):
        scales = random.uniform(0.5, 2, (-(-n // size), -(-k // size)))
        scales = scales.astype({"F32": np.float32, "BF16": BF16}[dtype])
        return {".weight": ["F8_E4M3", e4m3(random, n, k)], ending: [dtype, scales]}

    return make, lambda arrays: blocks(arrays[".weight"], arrays[ending].astype(np.float64), size)


def fp8_per_row(dtype, *columns, ending=".weight_scale"):
    """Tensors of FP8 with a scale per row, [n, *columns]."""

    def make(random, n, k):
        return {".weight": ["F8_E4M3", e4m3(random, n, k)], ending: factors(random, dtype, n, *columns)}

    def meaning(arrays):
        codes, scales = arrays[".weight"].view(ml_dtypes.float8_e4m3fn), arrays[ending]
        return codes.astype(np.float64) * scales.astype(np.float64).reshape(-1, 1)

    return make, meaning


def fp8_per_matrix(dtype, *shape, ending=".weight_scale"):
    """Tensors of FP8 with one scale, of that shape."""

    def make(random, n, k):
        return {".weight": ["F8_E4M3", e4m3(random, n, k)], ending: factors(random, dtype, *shape)}

    return make, fp8_per_row(dtype, ending=ending)[1]


def mxfp4_per_expert(ending):
    def make(random, n, k):
        return {
            ending: ["U8", random.integers(0, 256, (n, k // 2), np.uint8)],
            ".weight_scale": ["U8", _scale_bytes(random, n, k // 32)],
        }

    return make, lambda arrays: mxfp4(arrays[ending], arrays[".weight_scale"])


def mxfp8(ending, dtype):
    def make(random, n, k):
        return {".weight": ["F8_E4M3", e4m3(random, n, k)], ending: [dtype, _scale_bytes(random, n, -(-k // 32))]}

    def meaning(arrays):
        scales = arrays[ending].view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        return arrays[".weight"].view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales.repeat(32, 1)

    return make, meaning


NVFP4 = {"modelopt": (".weight", ".weight_scale_2"), "llm-compressor": (".weight_packed", ".weight_global_scale")}


def nvfp4(spelling):
    """Tensors of NVFP4 by these names."""
    codes, factor = NVFP4[spelling]
    divides = spelling != "modelopt"

    def make(random, n, k):
        whole = np.float32(random.uniform(20, 50) if divides else random.uniform(0.02, 0.05))
        return {
            codes: ["U8", random.integers(0, 256, (n, k // 2), np.uint8)],
            ".weight_scale": ["F8_E4M3", random.integers(0, 127, (n, -(-k // 16)), np.uint8)],
            factor: ["F32", np.full(1 if divides else (), whole)],
        }

    def meaning(arrays):
        weights = nibbles(arrays[codes]).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        scales = arrays[".weight_scale"].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        product, whole = weights * scales.repeat(16, 1), float(arrays[factor].reshape(()))
        return product / whole if divides else product * whole

    return make, meaning


SCHEMES = {
    "deepseek_v4": Scheme("deepseek_v4", "ffn.experts", "n_routed_experts", _deepseek_v4, _deepseek_v4_meaning),
    "deepseek_v4 base": Scheme("deepseek_v4", "ffn.experts", "n_routed_experts", _flash_base, _flash_base_meaning),
    "deepseek_v4 bf16": Scheme("deepseek_v4", "ffn.experts", "n_routed_experts", _bf16(W), _bf16_meaning(W)),
    "gpt_oss": Scheme("gpt_oss", "mlp.experts", "num_local_experts", _gpt_oss, _gpt_oss_meaning, stacked=True),
    "int4": Scheme("compressed_tensors", "mlp.experts", "n_routed_experts", int4(PROJ), int4_meaning(PROJ)),
    "int4 w1": Scheme("compressed_tensors", "block_sparse_moe.experts", "num_local_experts", int4(W), int4_meaning(W)),
    "int4 zero points": per_expert("compressed_tensors", integers.asymmetric_int4, integers.asymmetric_int4_meaning),
    "int4 per row": per_expert("compressed_tensors", *integers.int4_per_row("F32")),
    "int8 packed": per_expert("compressed_tensors", *integers.packed_int8(32)),
    "int8 packed per row": per_expert("compressed_tensors", *integers.packed_int8(None)),
    "int8 per row": per_expert("int8", *integers.int8(".weight_scale", "BF16", lambda n, k: (n, 1))),
    "int8 per matrix": per_expert("int8", *integers.int8(".weight_scale", "F32", lambda n, k: ())),
    "int8 groups": per_expert("int8", *integers.int8(".weight_scale", "F16", lambda n, k: (n, k // 32))),
    "int8 blocks": per_expert("int8", *integers.int8(".weight_scale_inv", "F32", lambda n, k: (-(-n // 128), -(-k // 128)))),
    "bf16": Scheme("bf16", "mlp.experts", "num_experts", _bf16(PROJ), _bf16_meaning(PROJ)),
    "bf16 w1": Scheme("bf16", "block_sparse_moe.experts", "num_local_experts", _bf16(W), _bf16_meaning(W)),
    "bf16 native": Scheme("bf16", "experts", "num_experts", _bf16(W), _bf16_meaning(W)),
    "fp8": per_expert("fp8", *fp8(".weight_scale_inv", "F32"), count="n_routed_experts"),
    "fp8 w1": per_expert("fp8", *fp8(".weight_scale_inv", "F32"), W, "block_sparse_moe.experts", "num_local_experts"),
    "fp8 bf16": per_expert("fp8", *fp8(".weight_scale_inv", "BF16")),
    "fp8 weight_scale": per_expert("fp8", *fp8(".weight_scale", "BF16")),
    "fp8 per row": per_expert("fp8_per_row", *fp8_per_row("BF16", 1), count="n_routed_experts"),
    "fp8 per row, flat": per_expert("fp8_per_row", *fp8_per_row("F32")),
    "fp8 per matrix": per_expert("fp8_per_row", *fp8_per_matrix("F32")),
    "fp8 per matrix, inverse": per_expert("fp8_per_row", *fp8_per_matrix("BF16", ending=".weight_scale_inv")),
    "fp8 mistral": per_expert("fp8_per_row", *fp8_per_matrix("BF16", 1, ending=".qscale_weight"), W, "experts"),
    "mxfp8": per_expert("mxfp8", *mxfp8(".weight_scale_inv", "U8"), W, "block_sparse_moe.experts", "num_local_experts"),
    "mxfp8 weight_scale": per_expert("mxfp8", *mxfp8(".weight_scale", "U8")),
    "mxfp4 quark": per_expert("mxfp4", *mxfp4_per_expert(".weight")),
    "mxfp4 packed": per_expert(
        "mxfp4", *mxfp4_per_expert(".weight_packed"), W, "block_sparse_moe.experts", "num_local_experts"
    ),
    "nvfp4": per_expert("nvfp4", *nvfp4("modelopt")),
    "nvfp4 divided": per_expert("nvfp4", *nvfp4("llm-compressor")),
    "gptq": per_expert("gptq", integers.gptq, integers.gptq_meaning),
    "gptq w1": per_expert("gptq", integers.gptq, integers.gptq_meaning, W, "block_sparse_moe.experts", "num_local_experts"),
    "awq": per_expert("awq", integers.awq, integers.awq_meaning),
    "bf16 fused": all_in_one("bf16", stacked.bf16()),
    "bf16 transposed": all_in_one("bf16", stacked.bf16(), transposed=True),
    "llama4": all_in_one("bf16", stacked.bf16(), "feed_forward.experts", "num_local_experts", transposed=True),
    "aria": all_in_one("bf16", stacked.bf16(".weight"), stems=("fc1", "fc2"), transposed=True),
    "granite": all_in_one(
        "bf16", stacked.bf16(".weight"), "block_sparse_moe", "num_local_experts", stems=("input_linear", "output_linear")
    ),
    "step3": Scheme("bf16", "moe", "moe_num_experts", *stacked.step3(), stacked=True),
    "gpt_oss bf16": all_in_one(
        "gpt_oss", stacked.bf16(), count="num_local_experts", transposed=True, interleaved=True, bias="BF16"
    ),
    "fp8 fused": all_in_one("fp8", stacked.fp8, intermediate=128),
    "fp8 transposed": all_in_one("fp8", stacked.fp8, intermediate=128, transposed=True),
    "fp8 fused per matrix": all_in_one("fp8_per_row", stacked.fp8_per_matrix),
    "llama4 fp8": all_in_one("fp8_per_row", stacked.fbgemm, "feed_forward.experts", "num_local_experts", transposed=True),
}
