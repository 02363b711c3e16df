"""Which kernels run where: fake CPUs, compile flags within the requirements, detection against the system's, object code."""

import importlib
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import random_experts

from ktmoe import MXFP4, ExpertWeights, Scale, WeightFormat, backends
from ktmoe._native import core, isa
from ktmoe.backends import native
from ktmoe.backends.base import choose
from ktmoe.errors import UnavailableError

NATIVE = Path(core.__file__).parent
ALL_FEATURES = sorted(core.cpu_features())
#: The instruction set's row -> what "auto" takes on a CPU that has exactly its features.
BEST = {"portable": "fp32_lut", "avx512_bf16": "avx512_bf16"}


@pytest.fixture
def cpu(monkeypatch):
    """A function that makes this a CPU with just these features."""

    def pretend(*features):
        assert set(features) <= set(ALL_FEATURES)
        monkeypatch.setattr(core, "cpu_features", lambda: {name: name in features for name in ALL_FEATURES})

    return pretend


@pytest.mark.parametrize("row", isa.ISAS)
def test_a_cpu_with_exactly_one_rows_features(cpu, row):
    cpu(*isa.required_features(row))
    usable = [name for name in isa.ISAS if set(isa.required_features(name)) <= set(isa.required_features(row))]
    assert backends.available() == [n for n in backends.ranked() if any(i in usable for i in backends.get(n).isas)]
    assert choose("auto")[0] == backends.available()[0] == BEST[row]
    assert choose("auto", random_experts(np.random.default_rng(0), 1, 64, 64))[0] == BEST[row]


@pytest.mark.parametrize(
    ("row", "missing"), [(row, feature) for row in isa.ISAS for feature in isa.required_features(row)], ids=lambda value: value
)
def test_a_cpu_that_lacks_one_of_a_rows_features(cpu, row, missing):
    """By far the most telling message a user can get; and there is always a backend."""
    cpu(*(feature for feature in ALL_FEATURES if feature != missing))
    name = next(name for name in backends.ranked() if backends.get(name).isas == (row,))
    assert name not in backends.available()
    why = f"this CPU lacks {missing} (needed by {row})"
    assert backends.get(name).unavailable() == why
    with pytest.raises(UnavailableError, match=rf"'{name}' .*cannot be used: {re.escape(why)}\. Available: "):
        choose(name)
    assert f"{name}: {why}" in choose("auto")[1]


def test_a_cpu_with_nothing_and_one_with_everything(cpu):
    cpu()
    assert backends.available() == ["fp32_lut"]
    cpu(*ALL_FEATURES)
    assert backends.available() == backends.ranked()


def test_a_row_asks_for_what_it_implies():
    for name, row in isa.ISAS.items():
        for other in row.implies:
            assert set(isa.required_features(other)) <= set(isa.required_features(name))
            assert set(isa.compile_flags(other)) <= set(isa.compile_flags(name))
        assert set(isa.required_features(name)) <= set(ALL_FEATURES)


@pytest.mark.parametrize("row", isa.ISAS)
def test_compile_flags_are_within_the_requirement(row):
    """What the compiler may use, the CPU was asked for."""
    for flag in isa.compile_flags(row):
        feature = flag.removeprefix("-m")
        assert flag.startswith("-m")
        assert {feature, feature.replace("avx512", "avx512_")} & set(isa.required_features(row)), flag


def test_flags_of_all_c_files_name_no_instruction_set():
    assert not [flag for flag in isa.C_FLAGS if flag.startswith(("-march", "-mtune", "-m"))]
    assert not [flag for flag in isa.C_FLAGS if "fast-math" in flag or flag in ("-Ofast", "-funsafe-math-optimizations")]
    assert "-ffp-contract=off" in isa.C_FLAGS


def test_every_row_has_kernels_and_a_module():
    rows = set(isa.ISAS)
    source = Path(native.__file__).parent.parent / "_native"
    assert {folder.name for folder in (source / "kernels").iterdir() if folder.is_dir()} == rows
    assert rows == {isa_ for name in backends.ranked() for isa_ in getattr(backends.get(name), "isas", ())}
    for row in rows:
        assert native.load_table(row).name == row


def test_every_table_serves_mxfp4():
    for row in isa.ISAS:
        keys = native.load_table(row).kernels()
        assert len(keys) == len(set(keys))
        for folded in (True, False):
            assert ("q4", "ue8m0", (1, 32), "bf16", folded) in keys


def test_features_agree_with_the_systems():
    """/proc/cpuinfo lists what the kernel enabled; ours must be neither more nor less."""
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split()
    assert platform.machine() == "x86_64"
    assert core.cpu_features() == {name: name in flags for name in ALL_FEATURES}


def test_a_module_that_was_not_compiled_says_so(cpu, monkeypatch):
    cpu(*ALL_FEATURES)
    monkeypatch.setitem(sys.modules, "ktmoe._native.avx512_bf16", None)  # its import raises ImportError
    assert "avx512_bf16 was not compiled into this build" in backends.get("avx512_bf16").unavailable()
    assert backends.available() == ["fp32_lut"]
    with pytest.raises(UnavailableError, match=r"avx512_bf16 was not compiled into this build.*Available: fp32_lut"):
        choose("avx512_bf16")
    assert choose("auto")[0] == "fp32_lut"


def test_nothing_can_be_used(cpu, monkeypatch):
    cpu()
    monkeypatch.setitem(sys.modules, "ktmoe._native.portable", None)
    with pytest.raises(UnavailableError, match=r"no backend can be used: avx512_bf16: this CPU .*; fp32_lut: .*not compiled"):
        choose("auto")


def test_weights_that_no_kernel_serves(cpu):
    cpu(*ALL_FEATURES)
    weight_format = WeightFormat("q4", MXFP4.codebook, Scale("ue8m0", (1, 16)))
    experts = ExpertWeights(1, 64, 64, lambda *_: pytest.fail("was read"), {"gate": MXFP4, "up": weight_format, "down": MXFP4})
    for name in backends.ranked():
        with pytest.raises(UnavailableError, match=rf"'{name}' .* it has no kernels for .*q4 with ue8m0 scales per 1x16"):
            choose(name, experts)
    with pytest.raises(UnavailableError, match="no backend can be used"):
        choose("auto", experts)


# Object code

VECTOR_REGISTER = re.compile(r"%[yz]mm\d+|%k[0-7]\b")
#: Those on xmm registers start with v, as only these do in the baseline.
BASELINE_V = {"verr", "verw"}
#: Not tzcnt: objdump's name for rep bsf, which the baseline has.
SCALAR = re.compile(r"(andn|bextr|blsi|blsr|blsmsk|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|popcnt|crc32|movbe)[bwlq]?")


def disassembly(module):
    if not shutil.which("objdump"):
        pytest.skip("objdump is not installed")
    file = importlib.import_module(f"ktmoe._native.{module}").__file__
    return subprocess.run(["objdump", "-d", "--no-show-raw-insn", file], capture_output=True, text=True, check=True).stdout


def beyond_baseline(text):
    """(function, instruction) of everything that a baseline x86-64 lacks."""
    function, found = "", []
    for line in text.splitlines():
        if line.endswith(">:"):
            function = line.split("<")[1][:-2]
        elif "\t" in line:
            instruction = line.split("\t")[-1]
            mnemonic = instruction.split()[0] if instruction.split() else ""
            vector = VECTOR_REGISTER.search(instruction) or (mnemonic.startswith("v") and mnemonic not in BASELINE_V)
            if vector or SCALAR.fullmatch(mnemonic):
                found.append((function, instruction))
    return found


@pytest.mark.parametrize("module", ["core", *(name for name, row in isa.ISAS.items() if not isa.required_features(name))])
def test_what_every_cpu_runs_has_only_baseline_instructions(module):
    text = disassembly(module)
    assert text.count("\n") > 1000
    assert beyond_baseline(text) == []


@pytest.mark.parametrize("module", [name for name in isa.ISAS if isa.required_features(name)])
def test_other_instructions_are_only_in_an_instruction_sets_own_functions(module):
    """What the module runs before the backend was chosen (its initialisation, Cython's code) is baseline, too."""
    found = beyond_baseline(disassembly(module))
    assert len(found) > 1000
    initialisation = [function for function, _ in found if function.startswith(("PyInit", "__pyx", "_init", "__Pyx"))]
    assert initialisation == []
