"""Checkpoints whose tensors hold all experts of a layer, and what their numbers mean, by the models' own matrix products.

A layer's tensors are a gate_up of 2I outputs and a down. A model that multiplies `x @ W` keeps W as [inputs, outputs], which is
"transposed" here, and one that multiplies `x @ W.T` keeps it as [outputs, inputs].
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)


def stacked(
    make: Callable,
    stems=("gate_up_proj", "down_proj"),
    count: int = 3,
    *,
    transposed: bool = False,
    interleaved: bool = False,
    bias: str | None = None,
):
    """(tensors, meaning) of a scheme.

    make: (random, stem, count, outputs, inputs, transposed) -> ({ending: tensor}, dequantize).
    dequantize: {ending: array} -> float64 [count, outputs, inputs], or [count, inputs, outputs] if transposed. bias: its dtype.
    """

    def tensors(base, random, hidden, intermediate):
        made = {}
        for stem, outputs, inputs in ((stems[0], 2 * intermediate, hidden), (stems[1], hidden, intermediate)):
            for ending, tensor in make(random, stem, count, outputs, inputs, transposed)[0].items():
                made[f"{base}.{stem}{ending}"] = tensor
            if bias:
                numbers = random.standard_normal((count, outputs)).astype({"BF16": BF16, "F32": np.float32}[bias])
                made[f"{base}.{stem}_bias"] = [bias, numbers]
        return made

    def meaning(tensors, base, expert, projection):
        stem = f"{base}.{stems[projection == 'down']}"
        arrays = {name.removeprefix(stem): array for name, (_, array) in tensors.items() if name.startswith(stem)}
        biases = arrays.pop("_bias", None)
        weights = make(None, "", count, 0, 0, transposed)[1](arrays)[expert]
        weights = weights.T if transposed else weights
        outputs = np.arange(len(weights))
        if projection != "down":
            which = outputs % 2 if interleaved else outputs >= len(outputs) // 2
            outputs = outputs[which == (projection == "up")]
        return weights[outputs], None if biases is None else biases[expert, outputs].astype(np.float32)

    return tensors, meaning


def _shape(count, outputs, inputs, transposed):
    return (count, inputs, outputs) if transposed else (count, outputs, inputs)


def bf16(ending=""):
    def make(random, _stem, *shape):
        tensors = {ending: ["BF16", random.standard_normal(_shape(*shape)).astype(BF16)]} if random else {}
        return tensors, lambda arrays: arrays[ending].astype(np.float64)

    return make


def _e4m3(random, shape):
    codes = random.integers(0, 256, shape, np.uint8)
    return np.where(codes & 127 == 127, np.uint8(0), codes)


def fp8(random, _stem, *shape):
    """A float32 scale per 128x128, as transformers' FineGrainedFP8 has them."""
    tensors = {}
    if random:
        count, *sides = _shape(*shape)
        scales = random.uniform(0.5, 2, (count, *(-(-side // 128) for side in sides))).astype(np.float32)
        tensors = {"": ["F8_E4M3", _e4m3(random, (count, *sides))], "_scale_inv": ["F32", scales]}

    def dequantize(arrays):
        codes, scales = arrays[""].view(ml_dtypes.float8_e4m3fn).astype(np.float64), arrays["_scale_inv"].astype(np.float64)
        _, rows, columns = codes.shape
        return codes * scales.repeat(128, 1)[:, :rows].repeat(128, 2)[:, :, :columns]

    return tensors, dequantize


def fp8_per_matrix(random, _stem, count, outputs, inputs, transposed):
    """A scale per expert, of gate and up in common, as transformers has Mistral-Small-4: [E, 1, 1]."""
    assert not transposed
    tensors = {}
    if random:
        scales = random.uniform(0.5, 2, (count, 1, 1)).astype(BF16)
        tensors = {"": ["F8_E4M3", _e4m3(random, (count, outputs, inputs))], "_scale_inv": ["BF16", scales]}
    return (
        tensors,
        lambda arrays: arrays[""].view(ml_dtypes.float8_e4m3fn).astype(np.float64) * arrays["_scale_inv"].astype(np.float64),
    )


def fbgemm(random, stem, count, outputs, inputs, transposed):
    """A float32 scale per output, as transformers' fbgemm_fp8 has them for Llama-4: [E, 1, 2I] and [E, H, 1]."""
    assert transposed
    tensors = {}
    if random:
        scales = random.uniform(0.5, 2, (count, outputs, 1) if stem == "down_proj" else (count, 1, outputs))
        scales = scales.astype(np.float32)
        tensors = {"": ["F8_E4M3", _e4m3(random, (count, inputs, outputs))], "_scale": ["F32", scales]}

    def dequantize(arrays):
        codes = arrays[""].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return codes * arrays["_scale"].astype(np.float64).reshape(len(codes), 1, -1)

    return tensors, dequantize


def step3(count=3):
    """(tensors, meaning) of BF16 tensors that hold all experts, gate and up apart."""
    stems = {"gate": "gate_proj.weight", "up": "up_proj.weight", "down": "down_proj.weight"}

    def tensors(base, random, hidden, intermediate):
        shapes = {
            "gate": (count, intermediate, hidden),
            "up": (count, intermediate, hidden),
            "down": (count, hidden, intermediate),
        }
        return {f"{base}.{stems[p]}": ["BF16", random.standard_normal(shape).astype(BF16)] for p, shape in shapes.items()}

    return tensors, lambda tensors, base, expert, projection: (
        tensors[f"{base}.{stems[projection]}"][1][expert].astype(np.float64),
        None,
    )
