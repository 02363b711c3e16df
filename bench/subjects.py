"""Layers to measure: packed, with their limits, and with a probe that says whether their results are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bench import footprints, probe
from bench.cases import Case, Way
from bench.models import Model
from ktmoe import measuring
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer

#: The tokens of each expert, and the experts, of the batch by which it is found out how fast a layer multiplies.
_TRIAL = (48, 12)


@dataclass
class Subject:
    """A model's layers, which take turns and hold the same weights, and what the machine allows them."""

    model: Model
    way: Way
    num_experts: int
    layers: list[MoELayer]
    limits: measuring.LimitMeter
    probe: probe.Probe

    def batches(self, tokens: int, **how) -> Iterator[measuring.MeasuredBatch]:
        """how: as measuring.random_batches takes it."""
        return measuring.random_batches(tokens, self.model.top_k, self.num_experts, self.model.hidden, **how)

    @cached_property
    def slots_per_second(self) -> float:
        """(token, expert) pairs that it serves, roughly."""
        tokens = _TRIAL[0] * _TRIAL[1] // self.model.top_k
        result = measuring.run(self.layers[0], self.limits, self.batches(tokens, among=_TRIAL[1]), seconds=0, least=1)
        return tokens * self.model.top_k / result.seconds

    @property
    def footprint_of_llc(self) -> float:
        """The packed weights as a multiple of the last-level cache."""
        return footprints.of_cache(sum(layer.nbytes for layer in self.layers))


@contextmanager
def packed(case: Case, *, full: bool) -> Iterator[Subject]:
    """A model's footprint, as footprints.footprint() has it, packed for one way to compute."""
    size = footprints.footprint(case.model, full=full)
    experts = case.model.make(size.experts)
    layers = []
    try:
        with case.way.table(experts) as table:
            for _ in range(size.layers):
                layers.append(MoELayer(experts, case.way.backend, case.way.activations, **case.way.choices))
            limits = measuring.settled(layers[0], table)
            yield Subject(case.model, case.way, size.experts, layers, limits, _probe(case, experts))
    finally:
        for layer in layers:
            layer.close()


_probes: dict[tuple, probe.Probe] = {}


def _probe(case: Case, experts: ExpertWeights) -> probe.Probe:
    key = case.model, experts.num_experts, case.way.activations, *case.way.choices.values()
    if key not in _probes:
        ids = np.linspace(0, experts.num_experts - 1, case.model.top_k).astype(int).tolist()
        _probes[key] = probe.make(experts, ids, case.way)
    return _probes[key]
