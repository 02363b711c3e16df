"""DeepSeek-V4 (V4-Flash, V4-Pro): native names, MXFP4 experts.

An expert's tensors are {base}.{E}.{w1,w3,w2}.{weight,scale} with w1 = gate, w3 = up, w2 = down, where base is
layers.{L}.ffn.experts or mtp.{M}.ffn.experts, by itself or behind model. and language_model. prefixes:

    weight  I8 or U8 [N, K/2], two E2M1 codes a byte, low nibble = even k; or F4 [N, K], the same bytes
    scale   F8_E8M0 or U8 [N, K/32], bytes that mean 2**(b - 127)

Their meaning is that of the model's own inference code; config.json contributes swiglu_limit and the number of experts.
"""

from __future__ import annotations

from ktmoe.errors import FormatError
from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.loaders import naming, registry
from ktmoe.loaders.base import Loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.weights.activation import SILU, GatedActivation
from ktmoe.weights.formats import MXFP4

_NAMES = naming.Names("DeepSeek-V4", naming.Spelling(naming.NUMBERED_STEMS, (".weight", ".scale"), module=".ffn.experts"))


class DeepSeekV4(Loader):
    """Reads DeepSeek-V4's routed experts; layers are ints, and "mtp.0" and so on for the multi-token-prediction layers.

    num_experts is what the tensor names say, and n_routed_experts of config.json must agree with it where it is given.
    swiglu_limit of config.json, at the top or in text_config: absent, null and 0 mean no clamp, as in the model's own code.
    """

    def detect(self, checkpoint: Checkpoint) -> float:
        """0.9 if the first layer that can be read has MXFP4 experts of these names, else 0 (FP8 experts, for one).

        Raises MissingTensorError if the names fit but none of their files is there.
        """

        def score(spelling: naming.Spelling, prefix: str) -> float:
            for stem in spelling.stems.values():
                _shape(checkpoint, prefix + stem)
            return 0.9

        return _NAMES.detect(checkpoint, score)

    def layers(self, checkpoint: Checkpoint) -> list[int | str]:
        return _NAMES.layers(checkpoint)

    def load(self, checkpoint: Checkpoint, layer: int | str) -> ExpertWeights:
        """One layer's experts, which keep the checkpoint open and read a matrix when it is asked for.

        layer: int, or its digits, or a name such as "mtp.0". All headers are checked here, before any weight is read.
        A matrix that was read is released from the page cache: its next owner is the packed copy.
        Raises MissingTensorError for a layer, an expert or a tensor that does not exist; FormatError for experts that are not
        MXFP4; CheckpointError for experts of different shapes, and for a config.json that contradicts the tensors.
        """
        place = _NAMES.locate(checkpoint, layer)
        shapes = place.shapes(lambda name: _shape(checkpoint, name))
        limit = naming.swiglu_limit(checkpoint, 0.0)

        def read(expert: int, projection: str) -> Matrix:
            name, (n, k) = place.name(projection, expert), shapes[projection]
            codes = checkpoint.read(f"{name}.weight", release=True).reshape(MXFP4.codes_shape(n, k))
            scales = checkpoint.read(f"{name}.scale", release=True).reshape(MXFP4.scale.shape(n, k))
            return Matrix(name, MXFP4, (n, k), codes, scales)

        activation = GatedActivation(limit=limit) if limit else SILU
        return ExpertWeights(place.num_experts, *shapes["down"], read, MXFP4, activation, place.base)


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """(n, k) of a matrix, from its headers. Raises FormatError if it is not MXFP4."""
    weight, scale = checkpoint.info(f"{name}.weight"), checkpoint.info(f"{name}.scale")
    naming.check_dtype(weight, "I8", "U8", "F4")
    naming.check_dtype(scale, "F8_E8M0", "U8")
    naming.check_dimensions(weight, 2)
    n, columns = weight.shape
    k = columns if weight.dtype == "F4" else 2 * columns
    if k % 2:
        raise FormatError(f"{weight.name}: shape: expected an even number of F4 columns, found {list(weight.shape)}")
    naming.check_shape(scale, MXFP4.scale.shape(n, k), f"one scale per 32 along k = {k}")
    return n, k


registry.register("deepseek_v4", DeepSeekV4())
