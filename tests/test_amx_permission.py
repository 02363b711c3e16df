"""AMX's tiles have to be asked for: when, how often, and what happens if the operating system refuses."""

import errno
import os
import re
import sys

import numpy as np
import pytest
from environments import ROOT, run
from helpers import random_experts

from ktmoe import backends, show_config
from ktmoe._native import core, isa
from ktmoe.backends import native
from ktmoe.backends.base import Missing
from ktmoe.backends.choice import choose_backend
from ktmoe.errors import InputError, UnavailableError

REFUSED = "the operating system refused AMX's tiles: a thread's alternate signal stack is too small for them (needed by amx)"


class System:
    """An operating system: what it answers, and how often it was asked."""

    answer, times = 0, 0

    def permit_tiles(self):
        self.times += 1
        return self.answer


@pytest.fixture
def system(monkeypatch):
    """A system whose CPU has AMX, and a process that has asked for nothing."""
    monkeypatch.setattr(core, "cpu_features", lambda: dict.fromkeys(isa.required_features("amx"), True))
    monkeypatch.setattr(native, "_refused", {})
    system = System()
    monkeypatch.setattr(core, "permit_tiles", system.permit_tiles)
    return system


def test_a_choice_asks_and_a_look_does_not(system):
    assert backends.available()[0] == backends.ranked()[0] == "amx"
    assert backends.get("amx").lookup().table.name == "amx"
    for name in set(backends.names()) - {"amx"}:
        assert choose_backend(name)[:2] == (name, "asked for by name")
    experts = random_experts(np.random.default_rng(1), 1, 64, 64)
    assert choose_backend("auto", experts, "int16").name == "avx2"  # amx has no such mode
    assert system.times == 0
    assert choose_backend("auto")[:2] == ("amx", "the best available")
    assert system.times == 1
    assert choose_backend("amx")[:2] == ("amx", "asked for by name")


def test_a_refusal_is_passed_over(system):
    """And is not asked about again."""
    system.answer = errno.ENOSPC
    assert choose_backend("auto")[:2] == ("fp32_lut", f"the best available; amx: {REFUSED}")
    assert system.times == 1
    system.answer = 0
    assert choose_backend("auto")[:2] == ("fp32_lut", f"the best available; amx: {REFUSED}")
    assert backends.get("amx").lookup() == Missing(REFUSED)
    assert "amx" not in backends.available()
    assert system.times == 1


@pytest.mark.parametrize("by", ["asked for by name", "KTMOE_BACKEND"])
def test_a_refusal_by_name(system, monkeypatch, by):
    system.answer = errno.ENOSPC
    if by == "KTMOE_BACKEND":
        monkeypatch.setenv(by, "amx")
    message = f"backend 'amx' ({by}) cannot be used: {REFUSED}. Available: fp32_lut, avx512_bf16, avx2"
    for _ in range(2):
        with pytest.raises(UnavailableError, match=f"^{re.escape(message)}$"):
            choose_backend("auto" if by == "KTMOE_BACKEND" else "amx")
    assert system.times == 1
    assert choose_backend("avx2")[:2] == ("avx2", "asked for by name")


def test_a_refusal_is_shown(system, capsys):
    system.answer = errno.ENOSPC
    show_config()
    printed = capsys.readouterr().out
    assert f"\n  amx: not available: {REFUSED}\n" in printed
    assert f"\nchosen: fp32_lut (the best available; amx: {REFUSED})\n" in printed


def test_a_backend_with_another_instruction_set_falls_back_to_it(system):
    system.answer = errno.EPERM
    backend = native.NativeBackend({"bf16": ("amx", "avx512f")})
    assert backend.rank == isa.ISAS["amx"].rank
    assert backend.claim().table.name == "avx512f"
    assert backend.lookup().table.name == "avx512f"
    assert backend.rank == isa.ISAS["avx512f"].rank
    refused = f"the operating system refused AMX's tiles: {os.strerror(errno.EPERM)} (needed by amx)"
    assert native.NativeBackend({"bf16": ("amx",)}).lookup() == Missing(refused)
    assert system.times == 1


def test_instruction_sets_without_tiles_ask_for_nothing(system):
    system.answer = errno.ENOSPC
    for name in isa.ISAS:
        assert (native.refusal(name) is None) == ("amx_tile" not in isa.required_features(name))
    assert native.refusal("a plugin's own") is None
    assert system.times == 1


#: Linux's answers, in a process of its own, since it never takes a permission back.
FRESH = """
import emulator
assert not emulator.permitted()
import ktmoe
from ktmoe import backends
from ktmoe.backends.choice import choose_backend
available = backends.available()
choose_backend("fp32_lut")
assert not emulator.permitted()
import numpy as np
from helpers import random_experts
assert not emulator.permitted()
experts = random_experts(np.random.default_rng(1), 1, 64, 64)
ktmoe.MoELayer(experts, "fp32_lut").close()
assert not emulator.permitted()
with ktmoe.MoELayer(experts) as layer:
    print(layer.backend, emulator.permitted(), backends.available() == available)
"""


def test_linux_is_asked_when_a_layer_is_made():
    """On a CPU without AMX, never."""
    done = run([sys.executable, "-c", FRESH], PYTHONPATH=str(ROOT / "tests"))
    backend, permitted, same = done.stdout.split()
    assert same == "True"
    assert permitted == str(backend == "amx")
    if not native.missing_features("amx"):
        assert backend == "amx"


def test_a_refusal_holds_for_a_table_under_another_name(system):
    """A plugin may call by a name of its own what has amx's table."""
    system.answer = errno.ENOSPC
    backend = native.NativeBackend(
        {"bf16": ("mine", "portable")}, lambda isa: core.kernel_table("amx" if isa == "mine" else isa)
    )
    assert backend.claim().table.name == "portable"
    assert system.times == 1


@pytest.mark.parametrize("isas", [{}, {"int8": ("portable",)}, {"bf16": ()}])
def test_every_native_backend_has_the_exact_mode(isas):
    with pytest.raises(InputError, match="isas must name instruction sets for the form 'bf16', found"):
        native.NativeBackend(isas)
