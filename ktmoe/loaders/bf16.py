"""Experts that are not quantized: Qwen3-MoE, Mixtral and Mistral's own names, and tensors that hold all experts.

Tensors are BF16, or F16 or F32 in the whole layer. base is layers.{L}.mlp.experts, or another module's experts, behind
model. or other prefixes:

    {base}.{E}.{gate,up,down}_proj.weight [N, K]   transformers (Qwen3-MoE, DeepSeek-V3, GLM-4.5)
    {base}.{E}.{w1,w3,w2}.weight [N, K]            w1 = gate, w3 = up, w2 = down (Mixtral, Mistral, MiniMax)
    {base}.gate_up_proj and {base}.down_proj       [E, 2I, H] and [E, H, I], gate rows before up rows (Qwen3.5); or
                                                   transposed, [E, H, 2I] and [E, I, H] (Llama-4, Qwen3-VL)
    {base}.fc1.weight and {base}.fc2.weight        the same (Aria)
    {base}.{input,output}_linear.weight            the same, with base layers.{L}.block_sparse_moe (Granite)
    {base}.{gate,up,down}_proj.weight [E, N, K]    with base layers.{L}.moe (Step-3)

gate_up_proj with biases is gpt-oss's, and w1, w3 and w2 in ffn.experts are DeepSeek-V4's. Of config.json's keys, an activation
other than SiLU and a clamp (swiglu_limit) are refused, but for the models whose clamp is known; tensors of an expert's own may
have MiniMax-M3's, "swigluoai".
"""

from __future__ import annotations

from ktmoe.loaders import checks, naming, registry
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.deepseek_v4 import MODULE as DEEPSEEK_V4
from ktmoe.loaders.per_expert import spellings
from ktmoe.loaders.scheme import Endings, Headers, Scheme
from ktmoe.loaders.stacked import BIAS, Stacked
from ktmoe.weights.formats import BF16, F16, F32, WeightFormat

_FORMATS = {"BF16": BF16, "F16": F16, "F32": F32}
_QUANTIZED = dict.fromkeys(("scale", "scale_inv"), "scales mean quantized weights")
#: Names of tensors that hold all experts: (stems, ending) of Llama-4, Qwen3-VL and Qwen3.5, of Aria, of Granite, and of Step-3.
_STACKED = (
    (naming.FUSED_STEMS, ""),
    ({"gate": "fc1", "up": "fc1", "down": "fc2"}, ".weight"),
    ({"gate": "input_linear", "up": "input_linear", "down": "output_linear"}, ".weight"),
    (naming.PROJ_STEMS, ".weight"),
)


class Unquantized(Scheme):
    """Numbers of 16 or 32 bits."""

    stored = (Endings({"codes": ".weight"}, foreign=_QUANTIZED),)

    def format(self, headers: Headers) -> WeightFormat:
        info = headers.info("codes")
        checks.dtype(info, *_FORMATS)
        return _FORMATS[info.dtype]


class Bf16(Stacked):
    """Reads experts of 16 or 32 bits, each with tensors of its own or all in one."""

    def detect(self, checkpoint: Checkpoint) -> float:
        """0.8 if the first layer that can be read has BF16, F16 or F32 tensors of these names, else 0.

        Less than the loaders of quantized experts give: beside those, such ones are those of an extra layer (MTP).
        """

        def score(spelling: naming.Spelling, prefix: str) -> float:
            name = prefix + spelling.stems["gate"]
            if spelling.stacked and {name + BIAS, prefix + spelling.stems["down"] + BIAS} <= checkpoint.names():
                return 0.0  # gpt-oss
            if f"{DEEPSEEK_V4}." in prefix and spelling.stems == naming.NUMBERED_STEMS:
                return 0.0  # DeepSeek-V4, whose loader knows its clamp
            checks.dtype(checkpoint.info(name + spelling.endings[0]), *_FORMATS)
            return 0.8

        return self.names.detect(checkpoint, score)


_ALL_IN_ONE = (
    naming.Spelling(
        stems, (ending,), foreign={"bias": "biases are not supported", **_QUANTIZED}, stacked=True, arrays={"codes": ending}
    )
    for stems, ending in _STACKED
)

registry.register("bf16", Bf16(Unquantized(), "experts that are not quantized", (*spellings(Unquantized.stored), *_ALL_IN_ONE)))
