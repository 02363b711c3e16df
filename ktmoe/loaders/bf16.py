"""BF16 experts, not quantized: Qwen3-MoE, Mixtral and Mistral's own names, and the fused tensors of Qwen3.5.

Tensors are BF16, [N, K], where base is layers.{L}.mlp.experts, or another module's experts, behind model. or other prefixes:

    {base}.{E}.{gate,up,down}_proj.weight   transformers (Qwen3-MoE, DeepSeek-V3, GLM-4.5)
    {base}.{E}.{w1,w3,w2}.weight            w1 = gate, w3 = up, w2 = down (Mixtral, Mistral, MiniMax)
    {base}.gate_up_proj [E, 2I, H] and {base}.down_proj [E, H, I], gate rows before up rows (Qwen3.5)

There are fused tensors of the same names that are transposed, [E, H, 2I] and [E, I, H]: Llama 4, Qwen3-VL-MoE, and gpt-oss when
dequantized, which interleaves gate and up, too, and has biases. They are refused: by their shapes, which cannot be both, and by
the biases. Of config.json's keys, an activation other than SiLU and a clamp (swiglu_limit) are refused.
"""

from __future__ import annotations

import ml_dtypes

from ktmoe.errors import FormatError
from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.loaders import naming, registry
from ktmoe.loaders.base import NAMED, Loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.weights.formats import BF16

_QUANTIZED = "scales mean quantized weights"
_FOREIGN = {"bias": "biases are not supported", "scale": _QUANTIZED, "scale_inv": _QUANTIZED}
_NAMES = naming.Names(
    "BF16 experts",
    *(naming.Spelling(stems, (".weight",), foreign=_FOREIGN) for stems in (naming.PROJ_STEMS, naming.NUMBERED_STEMS)),
    naming.Spelling(naming.FUSED_STEMS, ("",), foreign=_FOREIGN, stacked=True),
)


class Bf16(Loader):
    """Reads BF16 experts.

    num_experts is what the tensors say; num_experts, n_routed_experts or num_local_experts of config.json, at the top or in
    text_config, must agree with it where it is given.
    """

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

        return _NAMES.detect(checkpoint, score)

    def layers(self, checkpoint: Checkpoint) -> list[int | str]:
        return _NAMES.layers(checkpoint)

    def load(self, checkpoint: Checkpoint, layer: int | str) -> ExpertWeights:
        """One layer's experts, which keep the checkpoint open and read a matrix when it is asked for.

        layer: int, or its digits, or a name such as "mtp.0". All headers are checked here, before any weight is read.
        A matrix that was read is released from the page cache: its next owner is the packed copy.
        Raises MissingTensorError for a layer, an expert or a tensor that does not exist; FormatError for tensors that are not
        BF16 or that are transposed, for biases, and for another activation than SiLU; CheckpointError for tensors that do not
        fit together, and for a config.json that contradicts them.
        """
        place = _NAMES.locate(checkpoint, layer)
        ending = place.endings[0]
        if place.spelling.stacked:
            gate_up, down = (_shape(checkpoint, place.name(projection, 0), 3) for projection in ("gate", "down"))
            if _transposed(gate_up, down):
                raise FormatError(
                    f"{place.name('gate', 0)}: shape: expected [experts, 2 intermediate, hidden], found it transposed, "
                    f"{list(gate_up)} beside {list(down)} of down_proj"
                )
            num_experts, hidden, intermediate = place.fused_shapes(gate_up, down)
        else:
            shapes = place.shapes(lambda name: _shape(checkpoint, name + ending, 2))
            num_experts, (hidden, intermediate) = place.num_experts, shapes["down"]

        def read(expert: int, projection: str) -> Matrix:
            name = place.name(projection, expert)
            if not place.spelling.stacked:
                stored = checkpoint.read(name + ending, release=True)
            elif projection == "down":
                stored = naming.read_slice(checkpoint, name, expert, num_experts)
            else:
                stored = naming.read_slice(checkpoint, name, 2 * expert + (projection == "up"), 2 * num_experts)
            shape = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
            label = f"{name}[{expert}] {projection}" if place.spelling.stacked else name
            return Matrix(label, BF16, shape, stored.view(ml_dtypes.bfloat16).reshape(shape))

        activation = naming.silu(checkpoint)
        return ExpertWeights(num_experts, hidden, intermediate, read, BF16, activation, place.base)


def _shape(checkpoint: Checkpoint, name: str, dimensions: int) -> tuple[int, ...]:
    """From the header. Raises FormatError if it is not BF16."""
    info = checkpoint.info(name)
    naming.check_dtype(info, "BF16")
    naming.check_dimensions(info, dimensions)
    return info.shape


def _transposed(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether they are [E, H, 2I] and [E, I, H], which [E, 2I, H] and [E, H, I] never are."""
    return len(gate_up) == len(down) == 3 and gate_up[1:] == (down[2], 2 * down[1])


registry.register("bf16", Bf16())
