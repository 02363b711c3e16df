"""Loader blocks: MXFP4, with all experts of a layer in one tensor, blocks.{L}.moe.{gate,up,down}.{codes,scales}.

codes   U8 [E, n, k/2], two E2M1 codes a byte, low nibble = even k
scales  U8 or F8_E8M0 [E, n, ceil(k/32)], bytes that mean 2**(b - 127)
"""

from __future__ import annotations

import math
import re

from ktmoe import MXFP4, SILU, ExpertWeights, Matrix
from ktmoe.errors import FormatError, MissingTensorError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import Loader
from ktmoe.loaders.checkpoint import Checkpoint

_NAME = re.compile(r"blocks\.(0|[1-9][0-9]{0,5})\.moe\.gate\.codes")  # no leading zero: one layer has one name
_DTYPES = {"codes": ("U8",), "scales": ("U8", "F8_E8M0")}


class Blocks(Loader):
    """Layers are ints. config.json contributes nothing: the activation is plain SwiGLU."""

    def detect(self, checkpoint: Checkpoint) -> float:
        return 0.9 if self.layers(checkpoint) else 0.0

    def layers(self, checkpoint: Checkpoint) -> list[int | str]:
        return sorted(int(match[1]) for name in checkpoint.names() if (match := _NAME.fullmatch(name)))

    def load(self, checkpoint: Checkpoint, layer: int | str) -> ExpertWeights:
        """Checks all headers here, and reads a matrix when it is asked for.

        Raises MissingTensorError for a layer or a tensor that does not exist, FormatError for one that is not as above.
        """
        layers = self.layers(checkpoint)
        if str(layer) not in map(str, layers):
            raise MissingTensorError(f"{checkpoint.path}: layer {layer!r}: expected one of {layers}")
        base = f"blocks.{layer}.moe"
        first = checkpoint.info(f"{base}.gate.codes")
        if len(first.shape) != 3 or 0 in first.shape:
            raise FormatError(f"{first.name}: expected three dimensions above 0, found {list(first.shape)}")
        num_experts, intermediate, columns = first.shape

        def shapes(projection: str) -> dict[str, tuple[int, int]]:
            n, k = experts.shape(projection)
            return {kind: shape for kind, (_, shape) in MXFP4.arrays(n, k).items()}  # of codes and scales

        def read(expert: int, projection: str) -> Matrix:
            name, arrays = f"{base}.{projection}", {}
            for kind, shape in shapes(projection).items():
                size = math.prod(shape)  # bytes, since an item is one
                byte_range = (expert * size, (expert + 1) * size)
                arrays[kind] = checkpoint.read(f"{name}.{kind}", byte_range=byte_range, release=True).reshape(shape)
            return Matrix(f"{name}[{expert}]", MXFP4, experts.shape(projection), **arrays)

        experts = ExpertWeights(num_experts, 2 * columns, intermediate, read, MXFP4, SILU, name=base)
        for projection in PROJECTIONS:
            for kind, shape in shapes(projection).items():
                info = checkpoint.info(f"{base}.{projection}.{kind}")
                if info.dtype not in _DTYPES[kind] or info.shape != (num_experts, *shape):
                    wanted = f"{' or '.join(_DTYPES[kind])} {[num_experts, *shape]}"
                    raise FormatError(f"{info.name}: expected {wanted}, found {info.dtype} {list(info.shape)}")
        return experts


loader = Blocks()
