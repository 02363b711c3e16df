"""How a backend can be tested on this machine: natively, under the emulator, or not at all."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass

import emulator
import pytest

from ktmoe import backends
from ktmoe._native import core
from ktmoe._native.isa import ISAS, required_features
from ktmoe.backends import base, native

#: Set by make test's second run, on a CPU with AMX: only what can be emulated instead, emulated.
if os.environ.get("KTMOE_TEST_EMULATE_AMX"):
    emulator.force()

_detected = core.cpu_features()


def missing_features(isa: str) -> list[str]:
    """What this CPU lacks, or has to be taken to lack since the emulator was forced to stand in for it."""
    return [f for f in required_features(isa) if not _detected.get(f) or (f in emulator.EMULATED and not emulator.native(f))]


def _way(isa: str) -> str:
    """ "native", "emulated" or "skipped: reason" for an instruction set."""
    missing = set(missing_features(isa))
    if not missing:
        return "native"
    if missing <= emulator.EMULATED and emulator.needed(*missing):
        return "emulated"
    return f"skipped: {emulator.unavailable() or 'this CPU lacks ' + ' '.join(sorted(missing))}"


@dataclass(frozen=True)
class Subject:
    """One backend on one of its instruction sets, with one of its activation modes as "auto"."""

    backend: str
    isa: str
    activations: str

    @property
    def id(self) -> str:
        """The backend's name, and what it leaves open."""
        words = [self.backend]
        if len(backends.get(self.backend).isas[self.activations]) > 1:
            words.append(self.isa)
        if self.activations != "bf16":
            words.append(self.activations)
        return "-".join(words)


def _subjects() -> list[Subject]:
    """Each mode on each of its instruction sets once, for the backend that runs on most CPUs; bf16 first."""
    having = {}
    for name in backends.ranked():
        for mode, isas in backends.get(name).isas.items():
            for isa in isas:
                having.setdefault((isa, mode), []).append(name)

    def needs(name):
        return min(len(required_features(isa)) for isa in backends.get(name).isas["bf16"])

    subjects = [Subject(min(names, key=needs), isa, mode) for (isa, mode), names in having.items()]
    return sorted(subjects, key=lambda subject: subject.activations != "bf16")


# Found out once, before any test changes what is detected.
SUBJECTS = {subject.id: subject for subject in _subjects()}
WAYS = {isa: _way(isa) for isa in ISAS}


@contextmanager
def prepared(isa: str, folder):
    """What that instruction set takes, or a skip. Only here do tests override detection. folder: keeps the emulator."""
    way = WAYS[isa]
    if way.startswith("skipped: "):
        pytest.skip(way.removeprefix("skipped: "))
    if way == "native":
        assert native.refusal(isa) is None  # AMX's tiles have to be asked for
        yield
        return
    with emulator.installed(folder), pytest.MonkeyPatch.context() as patch:
        emulator.reset()
        patch.setattr(native, "missing_features", lambda isa: [f for f in missing_features(isa) if f not in emulator.EMULATED])
        patch.setattr(native, "refusal", lambda isa: None)
        yield
        assert emulator.errors() == []


@contextmanager
def chosen(subject: Subject, folder):
    """The backend as that subject: its only instruction set, and its "auto" mode wherever that exists; MX modes
    are computed in the form of that name where they can be."""
    with prepared(subject.isa, folder), pytest.MonkeyPatch.context() as patch:
        backend = backends.get(subject.backend)
        isas = {subject.activations: (subject.isa,)}  # the first mode is "auto"
        isas.setdefault("bf16", backend.isas["bf16"])
        patch.setattr(backend, "isas", isas)
        patch.setattr(backend, "forms", (subject.activations,))
        patch.setattr(base, "NEVER_AUTO", frozenset())
        yield subject.backend
