"""Tensors of per-expert schemes that loaders refuse: one of them is another, or one more is there."""

import pytest
from checkpoints import SCHEMES, write, zeros

from ktmoe import loaders
from ktmoe.errors import FormatError

#: scheme -> label -> (a tensor of expert 0, what it is instead, what the message must say beside its name, and, where it names
#: another tensor, that one).
REFUSED = {
    "int8 per row": {
        "BF16 weight": ("up_proj.weight", zeros("BF16", 64, 96), ["dtype: expected I8", "found BF16 [64, 96]"]),
        "U8 scale": ("gate_proj.weight_scale", zeros("U8", 64, 1), ["expected F32 or BF16 or F16", "U8 [64, 1]"]),
        "per column": ("gate_proj.weight_scale", zeros("BF16", 1, 96), ["expected [1, 1] (one scale per 128x128)", "[1, 96]"]),
        "no group fits": ("gate_proj.weight_scale", zeros("BF16", 64, 5), ["divides k = 96", "group_size", "[64, 5]"]),
        "flat": ("gate_proj.weight", zeros("I8", 64), ["two dimensions above 0", "[64]"]),
        "zero points": ("gate_proj.weight_zero_point", zeros("I8", 64, 1), ["found one: asymmetric quantization to 8 bits"]),
        "bias": ("gate_proj.bias", zeros("BF16", 64), ["found one: biases"]),
    },
    "mxfp4 quark": {
        "FP6": (
            "gate_proj.weight",
            zeros("U8", 64, 72),
            ["shape: expected [64, 5]", "found [64, 3]"],
            "gate_proj.weight_scale",
        ),
        "I8": ("gate_proj.weight", zeros("I8", 64, 48), ["dtype: expected U8 or F4", "I8 [64, 48]"]),
        "E4M3 scale": ("gate_proj.weight_scale", zeros("F8_E4M3", 64, 3), ["expected F8_E8M0 or U8", "F8_E4M3 [64, 3]"]),
        "per 16": ("up_proj.weight_scale", zeros("U8", 64, 6), ["expected [64, 3] (one scale per 32 along k = 96)", "[64, 6]"]),
        "bias": ("gate_proj.bias", zeros("BF16", 64), ["found one: biases"]),
        "rotation": ("down_proj.input_rotation", zeros("I8", 64, 64), ["found one: inputs that are rotated"]),
    },
    "mxfp8": {
        "I8 weight": ("w1.weight", zeros("I8", 64, 96), ["dtype: expected F8_E4M3", "found I8 [64, 96]"]),
        "F32 scale": ("w1.weight_scale_inv", zeros("F32", 64, 3), ["expected F8_E8M0 or U8", "F32 [64, 3]"]),
        "blocks": ("w1.weight_scale_inv", zeros("U8", 1, 1), ["expected [64, 3] (one scale per 32 along k = 96)", "[1, 1]"]),
        "per 16": ("w2.weight_scale_inv", zeros("U8", 96, 4), ["expected [96, 2]", "found [96, 4]"]),
        "bias": ("w1.bias", zeros("BF16", 64), ["found one: biases"]),
    },
    "fp8": {
        "BF16 weight": ("gate_proj.weight", zeros("BF16", 64, 96), ["dtype: expected F8_E4M3", "found BF16 [64, 96]"]),
        "E5M2 would be": ("up_proj.weight", zeros("U8", 64, 96), ["dtype: expected F8_E4M3", "found U8 [64, 96]"]),
        "F16 scale": ("gate_proj.weight_scale_inv", zeros("F16", 1, 1), ["expected F32 or BF16 or F8_E8M0", "F16 [1, 1]"]),
        "another scale": ("up_proj.weight_scale_inv", zeros("BF16", 1, 1), ["dtype: expected F32", "BF16 [1, 1]"]),
        "flat": ("gate_proj.weight", zeros("F8_E4M3", 64), ["two dimensions above 0", "[64]"]),
        "no rows": ("gate_proj.weight", zeros("F8_E4M3", 0, 96), ["two dimensions above 0", "[0, 96]"]),
        "per row": ("gate_proj.weight_scale_inv", zeros("F32", 64, 1), ["expected [1, 1] (one scale per 128x128)", "[64, 1]"]),
        "bias": ("gate_proj.bias", zeros("BF16", 64), ["found one: biases"]),
        "AWQ": ("gate_proj.pre_quant_scale", zeros("BF16", 96), ["found one: inputs that are scaled"]),
    },
    "fp8 per row": {
        "BF16 weight": ("gate_proj.weight", zeros("BF16", 64, 96), ["dtype: expected F8_E4M3", "found BF16 [64, 96]"]),
        "U8 scale": ("gate_proj.weight_scale", zeros("U8", 64, 1), ["expected F32 or BF16 or F16", "U8 [64, 1]"]),
        "per matrix": ("up_proj.weight_scale", zeros("F32", 1), ["shape: expected [64] or [64, 1]", "found [1]"]),
        "two of a matrix": ("up_proj.weight_scale", zeros("F32", 2), ["shape: expected [64] or [64, 1]", "found [2]"]),
        "per column": ("up_proj.weight_scale", zeros("BF16", 1, 96), ["shape: expected [64] or [64, 1]", "found [1, 96]"]),
        "flat": ("gate_proj.weight", zeros("F8_E4M3", 64), ["two dimensions above 0", "[64]"]),
        "bias": ("gate_proj.bias", zeros("BF16", 64), ["found one: biases"]),
        "rotated": ("gate_proj.input_rotation", zeros("I8", 96, 96), ["found one: inputs that are rotated"]),
    },
    "nvfp4 divided": {
        "I32": ("gate_proj.weight_packed", zeros("I32", 64, 12), ["dtype: expected U8", "I32 [64, 12]"]),
    },
    "nvfp4": {
        "F32 scale": ("gate_proj.weight_scale", zeros("F32", 64, 6), ["expected F8_E4M3", "F32 [64, 6]"]),
        "per 32": ("up_proj.weight_scale", zeros("F8_E4M3", 64, 3), ["[64, 6] (one scale per 16 along k = 96)"]),
        "per row": ("up_proj.weight_scale_2", zeros("F32", 64), ["shape: expected [] or [1]", "found [64]"]),
        "BF16": ("up_proj.weight_scale_2", zeros("BF16", 1), ["dtype: expected F32", "found BF16 [1]"]),
        "bias": ("gate_proj.bias", zeros("BF16", 64), ["found one: biases"]),
    },
    "awq": {
        "U8": ("gate_proj.qweight", zeros("U8", 96, 8), ["dtype: expected I32", "U8 [96, 8]"]),
        "F32 scales": ("gate_proj.scales", zeros("F32", 3, 64), ["dtype: expected F16 or BF16", "F32 [3, 64]"]),
        "another group": (
            "up_proj.scales",
            zeros("F16", 6, 64),
            ["expected [3, 64] (one scale per 32 along k = 96)", "[6, 64]"],
        ),
        "zeros": ("gate_proj.qzeros", zeros("I32", 3, 64), ["expected [3, 8] (one zero point per 32 along k = 96)", "[3, 64]"]),
        "no group fits": ("gate_proj.scales", zeros("F16", 5, 64), ["rows that divides k = 96", "group_size", "[5, 64]"]),
        "g_idx": ("gate_proj.g_idx", zeros("I32", 96), ["found one: that is GPTQ's"]),
        "bias": ("gate_proj.bias", zeros("F16", 64), ["found one: biases"]),
    },
    "gptq": {
        "U8": ("gate_proj.qweight", zeros("U8", 12, 64), ["dtype: expected I32", "U8 [12, 64]"]),
        "F32 scales": ("gate_proj.scales", zeros("F32", 3, 64), ["dtype: expected F16 or BF16", "F32 [3, 64]"]),
        "transposed": ("up_proj.scales", zeros("F16", 64, 3), ["expected [3, 64] (one scale per 32 along k = 96)", "[64, 3]"]),
        "no group fits": ("gate_proj.scales", zeros("F16", 5, 64), ["rows that divides k = 96", "group_size", "[5, 64]"]),
        "F16 zeros": ("gate_proj.qzeros", zeros("F16", 3, 64), ["dtype: expected I32", "F16 [3, 64]"]),
        "zeros": ("gate_proj.qzeros", zeros("I32", 3, 64), ["expected [3, 8] (eight zero points an item)", "[3, 64]"]),
        "I64 g_idx": ("gate_proj.g_idx", zeros("I64", 96), ["dtype: expected I32", "I64 [96]"]),
        "short g_idx": ("gate_proj.g_idx", zeros("I32", 64), ["expected [96] (one group per k)", "found [64]"]),
        "bias": ("gate_proj.bias", zeros("F16", 64), ["found one: biases"]),
    },
    "int4": {
        "flat": ("gate_proj.weight_packed", zeros("I32", 768), ["two dimensions", "[768]"]),
        "no rows": ("gate_proj.weight_packed", zeros("I32", 0, 12), ["above 0", "[0, 12]"]),
        "U8 weights": ("up_proj.weight_packed", zeros("U8", 64, 48), ["dtype", "expected I32", "U8 [64, 48]"]),
        "F16 scale": ("up_proj.weight_scale", zeros("F16", 64, 3), ["dtype", "expected BF16", "F16 [64, 3]"]),
        "F32 scale": ("gate_proj.weight_scale", zeros("F32", 64, 3), ["dtype", "expected BF16 or F16", "F32 [64, 3]"]),
        "one scale per row": ("down_proj.weight_scale", zeros("BF16", 96, 1), ["expected [96, 2]", "per 32", "[96, 1]"]),
        "no group fits": ("gate_proj.weight_scale", zeros("BF16", 64, 5), ["divides k = 96", "group_size", "[64, 5]"]),
        "flat scale": ("gate_proj.weight_scale", zeros("BF16", 192), ["two dimensions", "[192]"]),
        "too few rows": ("gate_proj.weight_scale", zeros("BF16", 63, 3), ["expected [64, 3]", "[63, 3]"]),
        "another group": ("down_proj.weight_scale", zeros("BF16", 96, 4), ["expected [96, 2]", "per 32", "[96, 4]"]),
        "F32 shape": ("up_proj.weight_shape", zeros("F32", 2), ["expected I32 or I64", "F32 [2]"]),
        "long shape": ("up_proj.weight_shape", zeros("I64", 3), ["expected [2]", "[3]"]),
        "activation order": ("gate_proj.weight_g_idx", zeros("I32", 96), ["found one: activation reordering"]),
        "global scale": ("gate_proj.weight_global_scale", zeros("F32", 1), ["found one: FP4"]),
        "bias": ("down_proj.bias", zeros("BF16", 96), ["found one: biases"]),
    },
}


@pytest.mark.parametrize(("name", "label"), [(name, label) for name, of in REFUSED.items() for label in of])
def test_refused(tmp_path, name, label):
    scheme = SCHEMES[name]
    suffix, tensor, words, *other = REFUSED[name][label]
    base = "model.layers.0"
    expert = f"{base}.{scheme.module}.0"
    checkpoint = write(tmp_path, scheme.layer(base) | {f"{expert}.{suffix}": tensor})
    with pytest.raises(FormatError) as caught:
        loaders.get(scheme.loader).load(checkpoint, 0)
    (named,) = other or [suffix]
    assert all(word in str(caught.value) for word in [f"{expert}.{named}: ", "expected", *words]), str(caught.value)
