"""Kernels to measure: layers of one expert's weights that use no other kernel, in memory and in a core's cache."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

import ktmoe
from bench import footprints, machine, probe
from bench.cases import EVERYWHERE, Way, every_way
from bench.models import Model, models
from ktmoe import measuring
from ktmoe._native import core
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.layer import MoELayer

WEIGHTS = (
    "MXFP4",
    "NVFP4",
    "INT4",
    "GPTQ symmetric",
    "GPTQ",
    "MXFP8",
    "FP8",
    "FP8 per row",
    "INT8 per row",
    "INT8 per group",
    "BF16",
)
#: Where the weights are: rotated through a footprint that no cache holds, or in one core's L2, for one thread.
SOURCES = ("memory", "L2")
#: The part of L2 that the weights of an expert take there, which leaves some for rows.
_SHARE_OF_L2 = 0.75
_HIDDEN_IN_L2 = 1024
_COLUMNS = 128  # whole panels, and whole blocks of 128x128


@dataclass(frozen=True)
class Kernel:
    """A kernel of an instruction set's table. folds: whether it takes weights that already hold their scales."""

    weights: str
    way: Way
    folds: bool
    source: str

    @property
    def id(self) -> str:
        return f"{self.weights}-{self.way.isa}-{self.way.activations}-{self.scales}-{self.source}"

    @property
    def scales(self) -> str:
        """Onto each weight, onto each of two numbers whose sum it is, onto each group's sum, or none."""
        if self.weights in ("BF16", "FP8 per row", "INT8 per row"):
            return "none"
        in_weights = "in two numbers a weight" if self.way.tuned_for == "prefill" else "in weights"
        return in_weights if self.folds else "of sums"


def kernels() -> Iterator[Kernel]:
    """Each one of each table that runs here, once. GPTQ's kernels are AWQ's, too."""
    seen = set()
    for weights in WEIGHTS:
        experts = replace(models()[EVERYWHERE], weights=weights).make(1)
        weight_format = experts.formats["gate"]
        for way in every_way(experts):
            with way.table(experts) as table:
                folding = {bool(core.folds(table, weight_format, way.activations, **way.choices))}
            if True in folding and weight_format.scale.kind == "ue8m0":  # some scales fold and some do not
                folding.add(False)
            for folds in sorted(folding, reverse=True):
                for source in SOURCES:
                    kernel = Kernel(weights, way, folds, source)
                    if kernel.id not in seen:
                        seen.add(kernel.id)
                        yield kernel


@dataclass(frozen=True)
class Subject:
    """A kernel's layer, and what the machine allows it."""

    kernel: Kernel
    layer: MoELayer
    limits: measuring.LimitMeter
    probe: probe.Probe

    @property
    def footprint_of_llc(self) -> float:
        return footprints.of_cache(self.layer.nbytes)


@contextmanager
def packed(kernel: Kernel) -> Iterator[Subject]:
    """One expert, or as many copies of it as CACHE_TIMES caches take."""
    threads = ktmoe.get_num_threads()
    model = replace(models()[EVERYWHERE], weights=kernel.weights)
    if kernel.source == "L2":
        ktmoe.set_num_threads(1)
        columns = math.lcm(_COLUMNS, *model.make(1).formats["down"].unit)  # no super-scale is cut
        smallest = replace(model, hidden=_HIDDEN_IN_L2, intermediate=columns)
        panels = max(1, int(_SHARE_OF_L2 * machine.l2_bytes() / smallest.expert_bytes))
        experts = copies(replace(smallest, intermediate=panels * columns), 1, kernel.folds)
    else:
        most = min(footprints.wanted_bytes(), machine.usable_bytes(footprints.MEMORY_SHARE))
        experts = copies(model, most // model.expert_bytes + 1, kernel.folds)
    try:
        with (
            kernel.way.table(experts) as table,
            MoELayer(experts, kernel.way.backend, kernel.way.activations, **kernel.way.choices) as layer,
        ):
            used = {bool(terms) for terms in core.folded(layer.packed).values()}
            assert used == {kernel.folds}, f"{kernel.id}: the layer uses other kernels"
            check = probe.make(experts, [0], kernel.way)
            yield Subject(kernel, layer, measuring.settled(layer, table), check)
    finally:
        ktmoe.set_num_threads(threads)


def copies(model: Model, count: int, folds: bool = True) -> ExpertWeights:
    """Experts that all have the same weights. Not folds: one scale byte is 0 in each matrix, which no kernel may fold."""
    one = model.make(1)
    matrices = {projection: one.matrix(0, projection) for projection in PROJECTIONS}
    for projection, matrix in matrices.items():
        if not folds and matrix.format.scale is not None and matrix.format.scale.kind == "ue8m0":
            scales = matrix.scales.copy()
            scales[0, 0] = 0
            matrices[projection] = replace(matrix, scales=scales)

    def read(_expert, projection):
        return matrices[projection]

    return ExpertWeights(count, model.hidden, model.intermediate, read, one.formats, one.activation, one.name)


def one_expert_each(layer: MoELayer, rows: int) -> Iterator[measuring.MeasuredBatch]:
    """Endless batches, each of one expert. Experts take turns: one is out of the caches when it is next."""
    x = np.random.default_rng(rows).standard_normal((rows, layer.hidden), np.float32).astype(ml_dtypes.bfloat16)
    weights = np.ones((rows, 1), np.float32)
    for expert in itertools.cycle(range(layer.num_experts)):
        yield measuring.MeasuredBatch(x, np.full((rows, 1), expert, np.int64), weights, np.array([expert]), rows)
