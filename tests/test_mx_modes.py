"""Activation modes of MX formats: their names, who serves them, and that all ways through a layer give the same bits."""

import pytest

from ktmoe.errors import InputError
from ktmoe.modes import MODES, mode_of
from ktmoe.quantization import RULES

CEIL_4, EVEN_4, CEIL_8 = RULES["mxfp4", "ceil"], RULES["mxfp4", "even"], RULES["mxfp8", "ceil"]

#: Names of modes: the shortest one, the rules of x and of h, the forms of rows.
NAMES = {
    "bf16": ("bf16", None, None, ("bf16",)),
    "bf16/bf16": ("bf16", None, None, ("bf16",)),
    "int16": ("int16", None, None, ("int16",)),
    "int8": ("int8", None, None, ("int8",)),
    "mxfp4": ("mxfp4", CEIL_4, CEIL_4, ("bf16", "int16", "int8")),
    "mxfp4:ceil": ("mxfp4", CEIL_4, CEIL_4, ("bf16", "int16", "int8")),
    "mxfp4/mxfp4:ceil": ("mxfp4", CEIL_4, CEIL_4, ("bf16", "int16", "int8")),
    "mxfp4:even": ("mxfp4:even", EVEN_4, EVEN_4, ("bf16", "int16", "int8")),
    "mxfp4:even/mxfp4:even": ("mxfp4:even", EVEN_4, EVEN_4, ("bf16", "int16", "int8")),
    "mxfp4/mxfp4:even": ("mxfp4/mxfp4:even", CEIL_4, EVEN_4, ("bf16", "int16", "int8")),
    "mxfp8": ("mxfp8", CEIL_8, CEIL_8, ("bf16",)),
    "mxfp8/mxfp4:even": ("mxfp8/mxfp4:even", CEIL_8, EVEN_4, ("bf16",)),
    "mxfp4:ceil/bf16": ("mxfp4/bf16", CEIL_4, None, ("bf16",)),
    "bf16/mxfp8": ("bf16/mxfp8", None, CEIL_8, ("bf16",)),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_name_means(name):
    mode = mode_of(name)
    assert (mode.name, mode.x, mode.h, mode.forms) == NAMES[name]
    assert mode_of(mode.name) == mode


def test_every_rule_of_both_formats_makes_a_mode():
    rules = [rule for rule in RULES.values() if rule.target in ("mxfp4", "mxfp8")]
    assert len(rules) == 12
    for x in rules:
        assert mode_of(f"{x.target}:{x.name}").x is x
        for h in rules:
            mode = mode_of(f"{x.target}:{x.name}/{h.target}:{h.name}")
            assert (mode.x, mode.h) == (x, h)


def test_the_modes_of_lists_have_those_names():
    assert [mode_of(name).name for name in MODES] == list(MODES)


@pytest.mark.parametrize(
    "name",
    ["", "auto", "mxfp6", "bf16:ceil", "int8/int8", "int8/mxfp4", "mxfp4/", "mxfp4/mxfp4/mxfp4", "MXFP4", None, 4, ["bf16"]],
)
def test_a_name_that_is_none(name):
    with pytest.raises(InputError, match=r"activations must be one of bf16, int16, int8, mxfp8, mxfp4, or X/H.*found"):
        mode_of(name)


@pytest.mark.parametrize("name", ["mxfp8:gguf", "mxfp8:", "mxfp4/mxfp8:quark"])
def test_a_rule_that_the_format_does_not_have(name):
    with pytest.raises(InputError, match="rules of mxfp8 are ceil, round, floor, even, compressed-tensors, found"):
        mode_of(name)
