"""How checkpoints store matrices, as vLLM names what it reads: a Parameters for each scheme.

Names are those of a dense layer's parameters; w13_ and w2_ stand before those of routed experts. Scales of a layer's input are
not read: activations stay bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

from compressed_tensors import CompressionFormat
from compressed_tensors.quantization import ActivationOrdering, QuantizationArgs, QuantizationStrategy, QuantizationType

from ktmoe.errors import UnavailableError
from ktmoe.vllm.parameters import Parameters
from ktmoe.weights.elements import INT4, INT8, INT8_PLUS_128
from ktmoe.weights.formats import (
    BF16,
    FP8_PER_MATRIX,
    FP8_PER_ROW,
    MXFP4,
    MXFP8,
    Factor,
    WeightFormat,
    fp8,
    int4,
    int8,
    nvfp4,
    uint4,
)
from ktmoe.weights.order import AWQ, GPTQ

#: Kinds of scales that integers of 4 and 8 bits have.
_KINDS = ("bf16", "fp16")
_WEIGHT = {"codes": "weight", "scales": "weight_scale"}
_PACKED = {"codes": "weight_packed", "scales": "weight_scale"}
_INPUTS = {"input_scale": "inputs"}

UNQUANTIZED = Parameters(BF16, {"codes": "weight"})
MXFP4_WEIGHT = Parameters(MXFP4, _WEIGHT)
MXFP4_PACKED = Parameters(MXFP4, _PACKED)
MXFP8_WEIGHT = Parameters(MXFP8, _WEIGHT)
NVFP4_WEIGHT = Parameters(nvfp4(), {**_WEIGHT, "factor": "weight_scale_2"}, unread=_INPUTS)
NVFP4_PACKED = Parameters(
    nvfp4(divides=True), {**_PACKED, "factor": "weight_global_scale"}, unread={"input_global_scale": "inputs"}
)


def fp8_of_blocks(shape: list[int], scales: str = "weight_scale") -> Parameters:
    return Parameters(fp8("fp32", (shape[0], shape[1])), {"codes": "weight", "scales": scales}, unread=_INPUTS)


def fp8_of_rows(factor: str = "weight_scale") -> Parameters:
    return Parameters(FP8_PER_ROW, {"codes": "weight", "factor": factor}, unread=_INPUTS)


def fp8_of_matrices(factor: str = "weight_scale") -> Parameters:
    return Parameters(FP8_PER_MATRIX, {"codes": "weight", "factor": factor}, unread=_INPUTS)


def gptq(bits: int, group: int) -> Parameters:
    """Symmetric, so that qzeros are not read. group: -1 is a whole row. Raises UnavailableError."""
    if bits != 4:
        raise UnavailableError(f"expected GPTQ of 4 bits, found {bits}")
    points = {"qzeros": "points"}
    if group == -1:
        per_row = WeightFormat(INT4, factor=Factor(per_row=True), order=GPTQ)
        return Parameters(per_row, {"codes": "qweight", "factor": "scales"}, unread=points)
    return Parameters(int4(group, order=GPTQ), {"codes": "qweight", "scales": "scales"}, _KINDS, unread=points)


def awq(bits: int, group: int, zero_points: bool = True) -> Parameters:
    """Raises UnavailableError."""
    if bits != 4 or not zero_points or group == -1:
        points = "with" if zero_points else "without"
        raise UnavailableError(f"expected AWQ of 4 bits in groups with zero points, found {bits} in groups of {group} {points}")
    return Parameters(uint4(group, order=AWQ), {"codes": "qweight", "scales": "scales", "offsets": "qzeros"}, kinds=_KINDS)


def integers(bits: int, strategy: str, group: int | None, symmetric: bool) -> Parameters:
    """compressed-tensors' integers of 4 and 8 bits, packed in 32."""
    element, words, shape = {4: INT4, 8: INT8_PLUS_128}[bits], ("codes", "offsets"), {"weight_shape": "shape"}
    if strategy == QuantizationStrategy.CHANNEL:
        per_row = WeightFormat(element, factor=Factor(per_row=True))
        return Parameters(per_row, {"codes": "weight_packed", "factor": "weight_scale"}, words=words, unread=shape)
    if not symmetric:
        return Parameters(uint4(group, "bf16"), {**_PACKED, "offsets": "weight_zero_point"}, _KINDS, words, shape)
    return Parameters(int4(group) if bits == 4 else int8(group, element=element), _PACKED, _KINDS, words, shape)


def compressed(weights: QuantizationArgs, inputs: QuantizationArgs | None, form: str | None) -> Parameters:
    """A matrix of a scheme of compressed-tensors. inputs: how it rounds the layer's input. form: its format.

    Raises UnavailableError.
    """
    found = _compressed(weights, form)
    # "local" has scales of groups that are computed, under one that is stored
    return found.without_inputs() if inputs is None or inputs.dynamic is True else found


def _compressed(weights: QuantizationArgs, form: str | None) -> Parameters:
    bits, strategy, group = weights.num_bits, weights.strategy, weights.group_size
    grouped, whole = strategy == QuantizationStrategy.GROUP, (QuantizationStrategy.CHANNEL, QuantizationStrategy.TENSOR)
    reordered = weights.actorder in (ActivationOrdering.GROUP, ActivationOrdering.DYNAMIC)
    if weights.type == QuantizationType.FLOAT and weights.symmetric and not reordered:
        if (bits, strategy, group) == (4, QuantizationStrategy.TENSOR_GROUP, 16):
            return NVFP4_PACKED
        if grouped and group == 32 and bits in (4, 8):
            return MXFP4_PACKED if bits == 4 else MXFP8_WEIGHT
        if bits == 8 and strategy == QuantizationStrategy.BLOCK:
            return fp8_of_blocks(weights.block_structure)
        if bits == 8 and strategy in whole:
            return fp8_of_rows() if strategy == QuantizationStrategy.CHANNEL else fp8_of_matrices()
    if weights.type == QuantizationType.INT and not reordered:
        packed, plain = CompressionFormat.pack_quantized.value, CompressionFormat.int_quantized.value
        symmetric = weights.symmetric and (grouped or strategy == QuantizationStrategy.CHANNEL)
        if form == packed and bits in (4, 8) and (symmetric or (bits == 4 and grouped)):
            return integers(bits, strategy, group, weights.symmetric)
        if form == plain and bits == 8 and weights.symmetric and strategy in whole:
            factor = Factor(per_row=strategy == QuantizationStrategy.CHANNEL)
            unread = {**_INPUTS, "input_zero_point": "inputs"}
            return Parameters(WeightFormat(INT8, factor=factor), {"codes": "weight", "factor": "weight_scale"}, unread=unread)
    raise UnavailableError(
        f"expected a scheme of compressed-tensors that ktmoe reads, found {weights.type} of {bits} bits by {strategy}, "
        f"{'symmetric' if weights.symmetric else 'asymmetric'}, {'in order of activation, ' if reordered else ''}"
        f"in format {form}"
    )


def biased(parameters: Parameters) -> Parameters:
    """The same with biases."""
    return replace(parameters, endings={**parameters.endings, "bias": "bias"})
