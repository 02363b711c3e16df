"""What this machine allows a model's routed experts: measured without the model, on pages of a layer of zeros.

Only the routed experts are counted: attention, shared experts and the rest of a model take time of their own.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cache

import numpy as np

from ktmoe._native import core
from ktmoe.experts import ExpertSpec, ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.machine import memory
from ktmoe.matrix import Matrix
from ktmoe.measuring import settled, slot_flops

#: The bytes of the experts that are packed to measure: more than most caches hold, and packed in about a second.
STAND_IN_BYTES = 512 << 20
#: The most of the memory that can be had that they take.
SHARE_OF_MEMORY = 0.25
#: The most experts that are packed, where they are tiny.
MOST_EXPERTS = 4096
#: The measurements of each limit, which is their median.
ROUNDS = 5
READ_SECONDS, PEAK_SECONDS = 0.1, 0.02


@dataclass(frozen=True)
class Limits:
    """read: bytes per second that all threads read of packed weights. peak: FLOPs per second that they multiply at most.

    isa: the instruction set whose multiplications these are.
    """

    isa: str
    read: float
    peak: float

    def seconds(self, spec: ExpertSpec, packed_bytes: int, tokens: int, top_k: int) -> tuple[float, str]:
        """The least that one layer's call takes, and the limit that says so, "read" or "multiply".

        packed_bytes: of the layer. Each of the experts that random routing is expected to use is read once.
        """
        used = spec.num_experts * (1 - (1 - top_k / spec.num_experts) ** tokens)
        read = used / spec.num_experts * packed_bytes / self.read
        multiply = tokens * top_k * slot_flops(spec) / self.peak
        return max((read, "read"), (multiply, "multiply"))


def measured(experts: ExpertWeights, backend: str, table: core.KernelTable) -> Limits:
    """The limits for experts of such shapes and formats; none of their weights is read. It takes two seconds or so.

    backend: a native one. table: the kernel table that serves them.
    """
    with MoELayer(stand_in(experts), backend) as layer:
        found = settled(layer, table)
        rounds = [(found.read(READ_SECONDS), found.peak(PEAK_SECONDS)) for _ in range(ROUNDS)]
    return Limits(table.name, *map(statistics.median, zip(*rounds, strict=True)))


def stand_in(experts: ExpertWeights) -> ExpertWeights:
    """Experts of the same shapes and formats, as many as STAND_IN_BYTES take: zeros all over, factors that are 1, no biases."""
    available = memory.available_bytes()
    nbytes = STAND_IN_BYTES if available is None else min(STAND_IN_BYTES, SHARE_OF_MEMORY * available)
    number = int(nbytes // max(1, experts.nbytes // experts.num_experts))

    @cache
    def matrix(projection: str) -> Matrix:
        matrix_shape, weight_format = experts.shape(projection), experts.formats[projection]
        arrays = {label: np.zeros(shape, dtype) for label, (dtype, shape) in weight_format.arrays(*matrix_shape).items()}
        if "factor" in arrays:
            arrays["factor"] += 1  # some divide
        return Matrix(f"stand-in {projection}", weight_format, matrix_shape, **arrays)

    def read(expert: int, projection: str) -> Matrix:
        return matrix(projection)

    number = min(max(1, number), MOST_EXPERTS)
    return ExpertWeights(number, experts.hidden, experts.intermediate, read, experts.formats, experts.activation, "stand-in")
