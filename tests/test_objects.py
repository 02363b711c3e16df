"""The objects that the build linked: what every CPU runs has only baseline instructions, and instruction sets use their own."""

import re

import pytest
from built_objects import DRIVER, PYTHON, objdump, objects

from ktmoe._native import isa

VECTOR_REGISTER = re.compile(r"%[yz]mm\d+|%k[0-7]\b")
#: Those on xmm registers start with v, as only these do in the baseline.
BASELINE_V = {"verr", "verw"}
#: Not tzcnt: objdump's name for rep bsf, which the baseline has.
SCALAR = re.compile(r"(andn|bextr|blsi|blsr|blsmsk|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|popcnt|crc32|movbe)[bwlq]?")


def disassembly(folder):
    return objdump("-d", "--no-show-raw-insn", files=objects(folder))


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


@pytest.mark.parametrize(
    "folder", [DRIVER, PYTHON, *(name for name, row in isa.ISAS.items() if not isa.required_features(name))]
)
def test_what_every_cpu_runs_has_only_baseline_instructions(folder):
    text = disassembly(folder)
    assert text.count("\n") > 1000
    assert beyond_baseline(text) == []


@pytest.mark.parametrize("row", [name for name in isa.ISAS if isa.required_features(name)])
def test_an_instruction_sets_objects_use_it(row):
    assert len(beyond_baseline(disassembly(row))) > 1000
