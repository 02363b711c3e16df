"""What runs on this CPU: instruction sets, activation modes and ways to round weights, as the backends themselves say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

import ktmoe
from bench.models import Model
from ktmoe._native import core
from ktmoe.backends.base import Found
from ktmoe.backends.choice import choose_backend
from ktmoe.backends.native import NativeBackend
from ktmoe.experts import ExpertWeights

#: The model that every backend is measured with; the others are measured with the backend that "auto" chooses.
EVERYWHERE = "V4-Flash"


@dataclass(frozen=True)
class Way:
    """One way to compute. isa: one of the backend's. rounding, tuned_for: as MoELayer takes them."""

    backend: str
    isa: str
    activations: str
    rounding: str = "exact"
    tuned_for: str = "decode"

    @property
    def id(self) -> str:
        words = [self.backend, self.isa, self.activations]
        words += [self.rounding] if self.rounding != "exact" else []
        return "-".join([*words, *([self.tuned_for] if self.tuned_for != "decode" else [])])

    @property
    def choices(self) -> dict[str, str]:
        """The options that MoELayer and the reference take alike."""
        return {"rounding": self.rounding, "tuned_for": self.tuned_for}

    @contextmanager
    def table(self, experts: ExpertWeights) -> Iterator[core.KernelTable | None]:
        """While it lasts, the backend has no other instruction set for the mode. Yields the kernel table, if there is one."""
        backend = ktmoe.backends.get(self.backend)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "isas", {**backend.isas, self.activations: (self.isa,)})
            found = backend.lookup(experts, self.activations)
            yield found.table if isinstance(found, Found) else None


@dataclass(frozen=True)
class Case:
    """A model, computed in one way."""

    model: Model
    way: Way

    @property
    def id(self) -> str:
        return f"{self.model.name}-{self.way.id}"


def native_backends() -> Iterator[tuple[str, NativeBackend]]:
    """The native backends that can run here; others have no limits that could be measured."""
    for name in ktmoe.backends.available():
        backend = ktmoe.backends.get(name)
        if isinstance(backend, NativeBackend):
            yield name, backend


def layer_cases(models: list[Model], *, full: bool) -> Iterator[Case]:
    """Every way for EVERYWHERE, that of "auto" for the others. full: every way for all."""
    for model in models:
        experts = model.make(1)
        for way in every_way(experts) if full or model.name == EVERYWHERE else auto_ways(experts):
            yield Case(model, way)


def every_way(experts: ExpertWeights) -> Iterator[Way]:
    """All that can compute these experts here; kernels that several backends share, once."""
    shared = set()
    for name, backend in native_backends():
        for mode, isas in backend.isas.items():
            for isa in isas:
                if (isa, mode) not in shared:
                    shared.add((isa, mode))
                    yield from _ways(Way(name, isa, mode), experts)


def auto_ways(experts: ExpertWeights) -> Iterator[Way]:
    """What "auto" chooses, and the same with folded scales and for prefill where those make a difference."""
    choice = choose_backend("auto", experts)
    found = ktmoe.backends.get(choice.name).lookup(experts, choice.activations)
    if found.table is not None:
        yield from _ways(Way(choice.name, found.table.name, choice.activations), experts)


def _ways(way: Way, experts: ExpertWeights) -> Iterator[Way]:
    """The way, if it can run here, and the same with folded scales and for prefill if that makes a difference."""
    with way.table(experts) as table:
        if table is None:
            return
        rounds = any(_rounds(table, weight_format, way.activations) for weight_format in experts.formats.values())
        tuned = any(_tuned(table, weight_format, way.activations) for weight_format in experts.formats.values())
    yield way
    if tuned:
        yield replace(way, tuned_for="prefill")
    if rounds:
        yield replace(way, rounding="folded")


def _rounds(table: core.KernelTable, weight_format, mode: str) -> bool:
    """Whether it has kernels that round scaled weights to bfloat16."""
    return core.folds(table, weight_format, mode, "folded") and not core.folds(table, weight_format, mode)


def _tuned(table: core.KernelTable, weight_format, mode: str) -> bool:
    """Whether it has other kernels for prefill than for decode."""
    return core.folds(table, weight_format, mode, tuned_for="prefill") != core.folds(table, weight_format, mode)
