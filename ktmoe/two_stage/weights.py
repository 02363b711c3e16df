"""experts(): ExpertWeights from the arrays of MXFP4 weights that two-stage kernels take."""

from __future__ import annotations

from typing import Any

import numpy as np

from ktmoe import arrays
from ktmoe.errors import FormatError, InputError
from ktmoe.experts import ExpertWeights
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.two_stage.kinds import as_bytes
from ktmoe.weights.activation import SILU, GatedActivation
from ktmoe.weights.formats import MXFP4

#: How many rows of gate and of up stand in turn in w1; 0: all of gate's, then all of up's.
INTERLEAVES = (0, 1, 16)


def experts(
    w1: Any,
    w1_scale: Any,
    w2: Any,
    w2_scale: Any,
    *,
    w1_bias: Any = None,
    w2_bias: Any = None,
    interleave: int = 0,
    activation: GatedActivation = SILU,
    name: str = "experts",
    router_weight: str = "down_output",
) -> ExpertWeights:
    """Experts in MXFP4, E along the first axis, before any kernel's own shuffle. numpy arrays or torch CPU tensors.

    w1: bytes [E, 2I, H/2], two codes each, low nibble = even k; w1_scale: UE8M0 bytes [E, 2I, ceil(H/32)].
    w2: [E, H, I/2]; w2_scale: [E, H, ceil(I/32)]. w1_bias: float32 [E, 2I]; w2_bias: float32 [E, H].
    interleave: 0: w1's first I rows are gate's, the others up's. 1: its rows are g0, u0, g1, u1, ... 16: 16 rows of gate and 16
    of up in turn. activation, router_weight: the model's.
    Nothing is copied here; a matrix whose rows stand in turn is, when it is read. Raises InputError and FormatError, which name
    the array.

    Examples:
        >>> w1, w1_scale = np.zeros((8, 128, 32), np.uint8), np.full((8, 128, 2), 127, np.uint8)
        >>> w2, w2_scale = np.zeros((8, 64, 32), np.uint8), np.full((8, 64, 2), 127, np.uint8)
        >>> two_stage.experts(w1, w1_scale, w2, w2_scale, interleave=1)
        ExpertWeights('experts', 8 experts, hidden=64, intermediate=64, E2M1 with ue8m0 scales per 1x32)
    """
    given = {"w1": w1, "w1_scale": w1_scale, "w2": w2, "w2_scale": w2_scale}
    given = {label: as_bytes(value, f"{name}: {label}") for label, value in given.items()}
    for label, bias in (("w1_bias", w1_bias), ("w2_bias", w2_bias)):
        if bias is not None:
            given[label] = arrays.as_numpy(bias, f"{name}: {label}")
            if given[label].dtype != np.float32:
                raise FormatError(f"{name}: {label} must be float32, found {given[label].dtype}")
    if given["w1"].ndim != 3:
        raise FormatError(f"{name}: w1 must be [experts, rows, columns], found {list(given['w1'].shape)}")
    if not isinstance(interleave, int | np.integer) or interleave not in INTERLEAVES:
        raise InputError(f"{name}: interleave must be one of {INTERLEAVES}, found {show(interleave)}")
    interleave = int(interleave)
    count, both, hidden = given["w1"].shape[0], given["w1"].shape[1], 2 * given["w1"].shape[2]
    if both % (2 * max(interleave, 1)):
        raise FormatError(f"{name}: w1 must have a multiple of {2 * max(interleave, 1)} rows, found {both}")
    intermediate = both // 2
    wanted = {
        "w1": (count, both, hidden // 2),
        "w1_scale": (count, both, -(-hidden // 32)),
        "w1_bias": (count, both),
        "w2": (count, hidden, intermediate // 2),
        "w2_scale": (count, hidden, -(-intermediate // 32)),
        "w2_bias": (count, hidden),
    }
    for label, array in given.items():
        if array.shape != wanted[label]:
            raise FormatError(f"{name}: {label} must have shape {list(wanted[label])}, found {list(array.shape)}")

    def read(expert: int, projection: str) -> Matrix:
        array = "w2" if projection == "down" else "w1"
        shape = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
        labels = {"codes": array, "scales": f"{array}_scale", "bias": f"{array}_bias"}
        stored = {label: given[key][expert] for label, key in labels.items() if key in given}
        if projection != "down":
            stored = {label: _half(rows, interleave, second=projection == "up") for label, rows in stored.items()}
        stored = {label: np.ascontiguousarray(rows) for label, rows in stored.items()}
        return Matrix(f"{name}.{expert}.{projection}", MXFP4, shape, **stored)

    return ExpertWeights(count, hidden, intermediate, read, MXFP4, activation, name, router_weight)


def _half(rows: np.ndarray, interleave: int, second: bool) -> np.ndarray:
    """The rows of gate, or of up, among those of w1."""
    turns = rows.reshape(-1, 2, interleave or len(rows) // 2, *rows.shape[1:])
    return turns[:, int(second)].reshape(-1, *rows.shape[1:])
