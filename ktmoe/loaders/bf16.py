"""BF16 experts, not quantized: Qwen3-MoE, Mixtral and Mistral's own names, and the fused tensors of Qwen3.5.

Tensors are BF16, [N, K], where base is layers.{L}.mlp.experts, or another module's experts, behind model. or other prefixes:

    {base}.{E}.{gate,up,down}_proj.weight   transformers (Qwen3-MoE, DeepSeek-V3, GLM-4.5)
    {base}.{E}.{w1,w3,w2}.weight            w1 = gate, w3 = up, w2 = down (Mixtral, Mistral, MiniMax)
    {base}.gate_up_proj [E, 2I, H] and {base}.down_proj [E, H, I], gate rows before up rows (Qwen3.5)

There are fused tensors of the same names that are transposed, [E, H, 2I] and [E, I, H]: Llama 4, Qwen3-VL-MoE, and gpt-oss when
dequantized, which interleaves gate and up, too, and has biases. They are refused: by their shapes, which cannot be both, and by
the biases. Of config.json's keys, an activation other than SiLU and a clamp (swiglu_limit) are refused; tensors of
an expert's own may have MiniMax-M3's, "swigluoai".
"""

from __future__ import annotations

import ml_dtypes

from ktmoe.errors import FormatError
from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.loaders import naming, registry
from ktmoe.loaders.base import NAMED
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.per_expert import Headers, PerExpert, spellings
from ktmoe.weights.formats import BF16, WeightFormat

_QUANTIZED = "scales mean quantized weights"
_FOREIGN = {"bias": "biases are not supported", "scale": _QUANTIZED, "scale_inv": _QUANTIZED}


class Bf16(PerExpert):
    """Reads BF16 experts, each with tensors of its own or fused."""

    names = naming.Names(
        "BF16 experts",
        *spellings({"codes": ".weight"}, foreign=_FOREIGN),
        naming.Spelling(naming.FUSED_STEMS, ("",), foreign=_FOREIGN, stacked=True),
    )

    def detect(self, checkpoint: Checkpoint) -> float:
        """0.8 if the first layer that can be read has BF16 tensors of these names; NAMED if F16, F32, transposed; else 0.

        Less than the loaders of quantized experts give: beside those, BF16 ones are those of an extra layer (MTP).
        """

        def score(spelling: naming.Spelling, prefix: str) -> float:
            gate, _, down = (checkpoint.info(f"{prefix}{stem}{spelling.endings[0]}") for stem in spelling.stems.values())
            naming.check_dtype(gate, "BF16", "F16", "F32")
            if gate.dtype != "BF16" or (spelling.stacked and _transposed(gate.shape, down.shape)):
                return NAMED
            return 0.8

        return self.names.detect(checkpoint, score)

    def format(self, headers: Headers) -> WeightFormat:
        return BF16

    def load_place(self, place: naming.Place) -> ExpertWeights:
        """Raises FormatError for tensors that are not BF16 or that are transposed, too."""
        return _fused(place) if place.spelling.stacked else super().load_place(place)


def _fused(place: naming.Place) -> ExpertWeights:
    checkpoint = place.checkpoint
    gate_up, down = (_shape(checkpoint, place.name(projection, 0)) for projection in ("gate", "down"))
    if _transposed(gate_up, down):
        raise FormatError(
            f"{place.name('gate', 0)}: shape: expected [experts, 2 intermediate, hidden], found it transposed, "
            f"{list(gate_up)} beside {list(down)} of down_proj"
        )
    num_experts, hidden, intermediate = place.fused_shapes(gate_up, down)

    def read(expert: int, projection: str) -> Matrix:
        name = place.name(projection, expert)
        if projection == "down":
            stored, shape = naming.read_slice(checkpoint, name, expert, num_experts), (hidden, intermediate)
        else:
            half = 2 * expert + (projection == "up")
            stored, shape = naming.read_slice(checkpoint, name, half, 2 * num_experts), (intermediate, hidden)
        return Matrix(f"{name}[{expert}] {projection}", BF16, shape, stored.view(ml_dtypes.bfloat16).reshape(shape))

    return ExpertWeights(num_experts, hidden, intermediate, read, BF16, naming.silu(checkpoint), place.base)


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """From the header. Raises FormatError if it is not BF16."""
    info = checkpoint.info(name)
    naming.check_dtype(info, "BF16")
    naming.check_dimensions(info, 3)
    return info.shape


def _transposed(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether they are [E, H, 2I] and [E, I, H], which [E, 2I, H] and [E, H, I] never are."""
    return len(gate_up) == len(down) == 3 and gate_up[1:] == (down[2], 2 * down[1])


registry.register("bf16", Bf16())
