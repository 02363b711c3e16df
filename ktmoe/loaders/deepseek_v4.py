"""DeepSeek-V4 (V4-Flash, V4-Pro): native names, MXFP4 experts; FP8 experts in V4-Flash-Base; BF16 ones that were dequantized.

An expert's tensors are {base}.{E}.{w1,w3,w2}.{weight,scale} with w1 = gate, w3 = up, w2 = down, where base is
layers.{L}.ffn.experts or mtp.{M}.ffn.experts, by itself or behind model. and language_model. prefixes:

    weight  I8 or U8 [N, K/2], two E2M1 codes a byte, low nibble = even k; or F4 [N, K], the same bytes
    scale   F8_E8M0 or U8 [N, K/32], bytes that mean 2**(b - 127)

Or, in V4-Flash-Base, weight is F8_E4M3 [N, K], and scale F8_E8M0 or U8 [ceil(N/128), ceil(K/128)]. Or weight is BF16 [N, K],
without a scale.

Their meaning is that of the model's own inference code; config.json contributes swiglu_limit and the number of experts.
"""

from __future__ import annotations

from ktmoe.loaders import model_config, naming, registry
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.per_expert import PerExpert, spellings
from ktmoe.loaders.scheme import Endings, Headers, Scheme
from ktmoe.weights.activation import GatedActivation
from ktmoe.weights.formats import BF16, MXFP4, WeightFormat, fp8

#: What a layer's base ends in. Other models' own names have no ffn.
MODULE = ".ffn.experts"
_FP8 = fp8("ue8m0")


class WithScale(Scheme):
    """MXFP4 or FP8 with UE8M0 scales in `.scale`, or BF16 without."""

    stored = (Endings({"codes": ".weight"}), Endings({"codes": ".weight", "scales": ".scale"}))

    def format(self, headers: Headers) -> WeightFormat:
        if "scales" not in headers.arrays:
            return BF16
        return _FP8 if headers.info("codes").dtype == "F8_E4M3" else MXFP4


class DeepSeekV4(PerExpert):
    """Reads DeepSeek-V4's routed experts; layers are ints, and "mtp.0" and so on for the multi-token-prediction layers.

    swiglu_limit of config.json, at the top or in text_config: absent, null and 0 mean no clamp, as in the model's own code.
    """

    def activation(self, checkpoint: Checkpoint) -> GatedActivation:
        return model_config.clamped_silu(checkpoint)


_SPELLED = spellings(WithScale.stored, (naming.NUMBERED_STEMS,), MODULE)

registry.register("deepseek_v4", DeepSeekV4(WithScale(), "DeepSeek-V4", _SPELLED))
