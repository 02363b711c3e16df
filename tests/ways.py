"""How a backend can be tested on this machine: natively, under the emulator, or not at all."""

from __future__ import annotations

from contextlib import contextmanager

import emulator
import pytest

from ktmoe import backends
from ktmoe._native.isa import ISAS
from ktmoe.backends import native

#: CPU features that tests/emulator stands in for.
EMULATED_FEATURES = {"avx512_bf16"}


def _way(missing: set[str]) -> str:
    """ "native", "emulated" or "skipped: reason", where these CPU features are missing."""
    if not missing:
        return "native"
    if missing <= EMULATED_FEATURES and emulator.needed():
        return "emulated"
    return f"skipped: {emulator.unavailable() or 'this CPU lacks ' + ' '.join(sorted(missing))}"


def _way_of_backend(name: str) -> str:
    """The same for a backend: the best that one of its instruction sets allows."""
    ways = [_way(set(native.missing_features(isa))) for isa in backends.get(name).isas]
    return min(ways, key=lambda way: ("native", "emulated").index(way) if way in ("native", "emulated") else 2)


# Found out once, before any test changes what is detected.
BACKENDS = {name: _way_of_backend(name) for name in backends.ranked()}
ISA_TABLES = {name: _way(set(native.missing_features(name))) for name in ISAS}


@contextmanager
def prepared(way: str, folder):
    """What that way takes, or a skip. Here, and nowhere else, tests override detection. folder: keeps the compiled emulator."""
    if way.startswith("skipped: "):
        pytest.skip(way.removeprefix("skipped: "))
    if way == "native":
        yield
        return
    with emulator.installed(folder), pytest.MonkeyPatch.context() as patch:
        detected = native.missing_features
        patch.setattr(native, "missing_features", lambda isa: [f for f in detected(isa) if f not in EMULATED_FEATURES])
        yield
