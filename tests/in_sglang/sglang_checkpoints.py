"""A checkpoint for each --kt-method, and its experts as the method computes them."""

from __future__ import annotations

from ktmoe import ExpertWeights, load_experts, synthetic
from ktmoe.compat.methods import SERVED
from ktmoe.quantization import quantize

#: The model whose checkpoint it is, or what writes it.
WRITERS = {
    "MXFP4": synthetic.write_deepseek_v4,
    "RAWINT4": synthetic.write_kimi_k2,
    "BF16": synthetic.write_qwen3,
    "LLAMAFILE": synthetic.write_gguf,
    "FP8": synthetic.write_fp8,
    "FP8_PERCHANNEL": synthetic.PUBLISHED["FP8 per row"].write,
    "MXFP8": synthetic.write_mxfp8,
    "NVFP4": synthetic.write_nvfp4,
    "GPTQ_INT4": synthetic.PUBLISHED["GPTQ symmetric"].write,
    **{method: synthetic.write_qwen3 for method, served in SERVED.items() if served.rounds},
}


def experts(folder, method: str, layer: int) -> ExpertWeights:
    found = load_experts(folder, layer)
    return quantize(found, method[-4:].lower(), rule=method.lower()) if SERVED[method].rounds else found
