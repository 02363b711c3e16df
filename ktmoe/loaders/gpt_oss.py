"""gpt-oss (20b, 120b): experts with biases, all of a layer in one tensor, in MXFP4 or in BF16.

Tensors are {base}.{gate_up_proj,down_proj}{ending}, where base is layers.{L}.mlp.experts behind model. or other prefixes:

    gate_up_proj_blocks  U8 [E, 2I, H/32, 16], two E2M1 codes a byte, low nibble = even k; rows are interleaved: g0, u0, g1, u1
    gate_up_proj_scales  U8 or F8_E8M0 [E, 2I, H/32], bytes that mean 2**(b - 127)
    gate_up_proj_bias    BF16, F32 or F16 [E, 2I]
    down_proj_...        likewise, [E, H, I/32, 16], [E, H, I/32] and [E, H]

Or, in BF16, with the same biases:

    gate_up_proj         BF16 [E, H, 2I], columns g0, u0, g1, u1
    down_proj            BF16 [E, I, H]

Their meaning is that of the model's own inference code; config.json contributes swiglu_limit and swiglu_alpha.
"""

from __future__ import annotations

from typing import Any

from ktmoe.errors import FormatError, MissingTensorError
from ktmoe.experts import ExpertWeights
from ktmoe.loaders import checks, model_config, naming, registry
from ktmoe.loaders.base import NAMED
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.scheme import Headers, Scheme
from ktmoe.loaders.stacked import BIAS, Stacked
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.messages import show
from ktmoe.weights.activation import GatedActivation
from ktmoe.weights.formats import BF16, MXFP4, WeightFormat

_MXFP4 = {"codes": "_blocks", "scales": "_scales"}
_GROUP = MXFP4.scales["scales"].extent[1]


def _spelling(endings: tuple[str, ...], arrays: dict[str, str], **other: Any) -> naming.Spelling:
    return naming.Spelling(naming.FUSED_STEMS, endings, stacked=True, interleaved=True, arrays=arrays, **other)


class Blocks(Scheme):
    """MXFP4 in blocks and scales, or BF16. Only experts are stored so."""

    def format(self, headers: Headers) -> WeightFormat:
        return MXFP4 if "scales" in headers.arrays else BF16


class GptOss(Stacked):
    """Reads gpt-oss's routed experts. swiglu_limit absent or null means 7, and swiglu_alpha 1.702."""

    def detect(self, checkpoint: Checkpoint) -> float:
        """0.9 if the first layer that can be read has such experts of these names; NAMED if it has others of these names."""

        def score(spelling: naming.Spelling, prefix: str) -> float:
            self.check_headers(checkpoint, spelling, prefix)
            return 0.9

        return self.names.detect(checkpoint, score, refused=NAMED)

    def check_config(self, checkpoint: Checkpoint) -> None:
        if (found := model_config.value(checkpoint, "model_type")) == "openai_privacy_filter":  # whose gate comes first
            raise FormatError(
                f"{checkpoint.path}: model_type of config.json: expected 'gpt_oss' for these names, found {show(found)}"
            )

    def load_place(self, place: naming.Place) -> ExpertWeights:
        """Raises MissingTensorError for a layer without biases: its experts would compute something else."""
        experts = super().load_place(place)
        if BIAS not in place.endings:
            names = [place.name(projection, 0) + BIAS for projection in ("gate", "down")]
            raise MissingTensorError(f"{place.checkpoint.path}: expected {' and '.join(names)}, found neither")
        return experts

    def codes_shape(self, info: TensorInfo) -> tuple[int, int, int]:
        if info.dtype == "BF16":
            return super().codes_shape(info)
        checks.dimensions(info, 4)
        experts, rows, groups, _ = info.shape
        checks.shape(info, (experts, rows, groups, _GROUP // 2), "16 bytes of codes a group of 32")
        return experts, rows, groups * _GROUP // 2

    def stacked_activation(self, checkpoint: Checkpoint) -> GatedActivation:
        return model_config.swiglu_oai(checkpoint)


_SPELLED = (
    _spelling(tuple(_MXFP4.values()), _MXFP4, optional=(BIAS,), module=".mlp.experts"),
    _spelling(("", BIAS), {"codes": ""}),
)

registry.register("gpt_oss", GptOss(Blocks(), "gpt-oss", _SPELLED))
