"""Random weights of every ggml type that ktmoe computes. Every bit of a record is random, but for the size of its floats."""

from __future__ import annotations

import numpy as np

from ktmoe import ExpertWeights, Matrix
from ktmoe.experts import PROJECTIONS
from ktmoe.weights.ggml import GGML
from ktmoe.weights.grid_records import TernaryRecords
from ktmoe.weights.records import RecordOrder
from ktmoe.weights.scales import SCALE_KINDS

#: Numbers that multiply a record's codes are 2**e for e in these ranges, of either sign where a kind has signs.
_SIZES = {"fp16": (-11, -9), "ue8m0": (-8, -5), "e4m3": (-4, 0)}
#: The GGUF formats whose codes and scales stand in records, by name.
IN_RECORDS = {name: weight_format for name, weight_format in GGML.items() if isinstance(weight_format.order, RecordOrder)}


def random_bits(rng, order, records) -> np.ndarray:
    """Records of random bits, uint8 [records, bytes]: all that from_rows() writes, numbers or not."""
    stored = rng.integers(0, 256, (records, order.nbytes), np.uint8) & ~order.spare
    if isinstance(order, TernaryRecords):
        for offset, count, digits in order.runs:  # of the bytes that have the same digits, the lowest
            number = rng.integers(0, 3**digits, (records, count)) * 3 ** (5 - digits)
            stored[:, offset : offset + count] = -(-number * 256 // 243)
    return stored


def random_codes(rng, weight_format, count, n, k) -> np.ndarray:
    """`codes` of so many matrices [n, k], [count, n, ...]."""
    dtype, shape = weight_format.arrays(n, k)["codes"]
    if not isinstance(weight_format.order, RecordOrder):
        return rng.normal(0, k**-0.5, (count, *shape)).astype(dtype)
    records = random_bits(rng, weight_format.order, count * shape[0] * (k // weight_format.order.weights))
    for label, field in weight_format.order.fields.items():
        scale = weight_format.scales[label]
        if not SCALE_KINDS[scale.kind].field:
            continue  # any bits
        low, high = _SIZES[scale.kind]
        if label.startswith("super") and scale.kind == "fp16":
            low, high = low - 4, high - 4  # what they multiply is up to 63
        numbers = np.exp2(rng.uniform(low, high, (len(records), len(field.items)))) * rng.choice([-1, 1], (len(records), 1))
        stored = scale.stored(np.exp2(np.rint(np.log2(np.abs(numbers)))) if scale.kind == "ue8m0" else numbers)
        if scale.kind == "e4m3":
            stored &= 0x7F
        field.write(records, stored)
    return records.reshape(count, *shape)


def random_experts(rng, num_experts, hidden, intermediate, formats, **settings) -> ExpertWeights:
    """formats: ggml types by projection, or one of all. Factors are near 1."""
    names = dict.fromkeys(PROJECTIONS, formats) if isinstance(formats, str) else formats
    formats = {projection: GGML[name] for projection, name in names.items()}
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    codes = {p: random_codes(rng, formats[p], num_experts, *shapes[p]) for p in PROJECTIONS}
    factors = {p: rng.uniform(0.5, 2, (num_experts, 1)).astype(np.float32) for p in PROJECTIONS if formats[p].factor}

    def read(expert, projection):
        factor = factors[projection][expert] if projection in factors else None
        return Matrix(
            f"blk.0.{expert}.{projection}", formats[projection], shapes[projection], codes[projection][expert], factor=factor
        )

    return ExpertWeights(num_experts, hidden, intermediate, read, formats, **settings)
