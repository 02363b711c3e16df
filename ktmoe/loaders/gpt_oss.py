"""gpt-oss (20b, 120b): MXFP4 experts with biases, all experts of a layer in one tensor.

Tensors are {base}.{gate_up_proj,down_proj}_{blocks,scales,bias}, where base is layers.{L}.mlp.experts behind model. or other
prefixes:

    gate_up_proj_blocks  U8 [E, 2I, H/32, 16], two E2M1 codes a byte, low nibble = even k; rows are interleaved: g0, u0, g1, u1
    gate_up_proj_scales  U8 or F8_E8M0 [E, 2I, H/32], bytes that mean 2**(b - 127)
    gate_up_proj_bias    BF16 or F32 [E, 2I]
    down_proj_...        likewise, [E, H, I/32, 16], [E, H, I/32] and [E, H]

Biases may be absent. Their meaning is that of the model's own inference code; config.json contributes swiglu_limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import ml_dtypes
import numpy as np

from ktmoe import forks
from ktmoe.errors import CheckpointError
from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.loaders import naming, registry
from ktmoe.loaders.base import NAMED, Loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.weights.formats import MXFP4

_NAMES = naming.Names(
    "gpt-oss", naming.Spelling(naming.FUSED_STEMS, ("_blocks", "_scales"), ("_bias",), module=".mlp.experts", stacked=True)
)
_BIAS_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}
_GROUP = MXFP4.scale.extent[1]


class GptOss(Loader):
    """Reads gpt-oss's routed experts.

    num_experts is what the tensors' shapes say, and num_local_experts of config.json must agree with it where it is given.
    swiglu_limit of config.json, at the top or in text_config: absent and null mean 7.
    """

    def detect(self, checkpoint: Checkpoint) -> float:
        """0.9 if the first layer that can be read has MXFP4 experts of these names; NAMED if it has others of these names."""

        def score(spelling: naming.Spelling, prefix: str) -> float:
            for stem in ("gate_up_proj", "down_proj"):
                _shape(checkpoint, prefix + stem)
            return 0.9

        return _NAMES.detect(checkpoint, score, refused=NAMED)

    def layers(self, checkpoint: Checkpoint) -> list[int | str]:
        return _NAMES.layers(checkpoint)

    def load(self, checkpoint: Checkpoint, layer: int | str) -> ExpertWeights:
        """One layer's experts, which keep the checkpoint open and read an expert's slice of a tensor when it is asked for.

        layer: int, or its digits. All headers are checked here, before any weight is read. What was read is released from the
        page cache. Gate and up are read together, and the one that was not asked for is kept for a few experts.
        Raises MissingTensorError for a layer or a tensor that does not exist; FormatError for experts that are not MXFP4;
        CheckpointError for tensors that do not fit together, and for a config.json that contradicts them.
        """
        place = _NAMES.locate(checkpoint, layer)
        gate_up, down = place.name("gate", 0), place.name("down", 0)
        num_experts, hidden, intermediate = place.fused_shapes(_shape(checkpoint, gate_up), _shape(checkpoint, down))
        biased = "_bias" in place.endings
        if biased:
            for name, rows in ((gate_up, 2 * intermediate), (down, hidden)):
                info = checkpoint.info(f"{name}_bias")
                naming.check_dtype(info, *_BIAS_DTYPES)
                naming.check_shape(info, (num_experts, rows), "one bias per expert and row")
        limit = naming.swiglu_limit(checkpoint, naming.SWIGLU_OAI.limit)
        if not limit:
            raise CheckpointError(
                f"{checkpoint.path}: swiglu_limit of config.json: expected above 0 for gpt-oss, found {limit}"
            )

        def slab(name: str, expert: int, n: int, k: int) -> list[np.ndarray | None]:
            """Codes, scales and bias of one expert's n rows."""
            shapes = {label: shape for label, (_, shape) in MXFP4.arrays(n, k).items()}
            codes = naming.read_slice(checkpoint, f"{name}_blocks", expert, num_experts).reshape(shapes["codes"])
            scales = naming.read_slice(checkpoint, f"{name}_scales", expert, num_experts).reshape(shapes["scales"])
            if not biased:
                return [codes, scales, None]
            stored = naming.read_slice(checkpoint, f"{name}_bias", expert, num_experts)
            return [codes, scales, stored.view(_BIAS_DTYPES[checkpoint.info(f"{name}_bias").dtype]).astype(np.float32)]

        def both(expert: int) -> dict[str, Matrix]:
            arrays, shape = slab(gate_up, expert, 2 * intermediate, hidden), (intermediate, hidden)
            return {
                projection: Matrix(
                    f"{gate_up}[{expert}] {projection}",
                    MXFP4,
                    shape,
                    *(None if array is None else np.ascontiguousarray(array[first::2]) for array in arrays),
                )
                for first, projection in enumerate(("gate", "up"))
            }

        pairs = _Pairs(both)

        def read(expert: int, projection: str) -> Matrix:
            if projection != "down":
                return pairs.take(expert, projection)
            return Matrix(f"{down}[{expert}]", MXFP4, (hidden, intermediate), *slab(down, expert, hidden, intermediate))

        activation = replace(naming.SWIGLU_OAI, limit=limit)
        return ExpertWeights(num_experts, hidden, intermediate, read, MXFP4, activation, place.base)


class _Pairs:
    """Gate and up, read together: who asks for one of an expert's leaves the other for whoever asks for that.

    read: expert -> both by projection. At most `kept` experts wait for their second half; the oldest is dropped, and would be
    read again. Threads that ask for both halves at once share one read, and its exception.
    """

    def __init__(self, read: Callable[[int], dict[str, Matrix]], kept: int = 4):
        self._read = read
        self._kept = kept
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        """What another thread was reading is read again."""
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, str], Future[Matrix]] = {}

    def take(self, expert: int, projection: str) -> Matrix:
        other = "up" if projection == "gate" else "gate"
        with self._lock:
            left = self._waiting.pop((expert, projection), None)
            if left is None:
                mine = self._waiting[expert, other] = Future()
                while len(self._waiting) > self._kept:
                    del self._waiting[next(iter(self._waiting))]
        if left is not None:
            return left.result()
        try:
            pair = self._read(expert)
        except BaseException as error:
            with self._lock:
                if self._waiting.get((expert, other)) is mine:
                    del self._waiting[expert, other]  # the next one tries again
            mine.set_exception(error)
            raise
        mine.set_result(pair[other])
        return pair[projection]


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, int, int]:
    """(E, n, k) of {name}_blocks and {name}_scales, from their headers. Raises FormatError if they are not MXFP4."""
    blocks, scales = checkpoint.info(f"{name}_blocks"), checkpoint.info(f"{name}_scales")
    naming.check_dtype(blocks, "U8")
    naming.check_dtype(scales, "U8", "F8_E8M0")
    naming.check_dimensions(blocks, 4)
    num_experts, n, groups, _ = blocks.shape
    naming.check_shape(blocks, (num_experts, n, groups, _GROUP // 2), "16 bytes of codes a group of 32")
    naming.check_shape(scales, (num_experts, n, groups), "one scale per 32 along k")
    return num_experts, n, groups * _GROUP


registry.register("gpt_oss", GptOss())
