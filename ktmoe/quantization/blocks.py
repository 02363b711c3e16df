"""A rule of an MX format as the native code has it that rounds blocks of 32 bfloat16 numbers: activations."""

from __future__ import annotations

from ktmoe._native import core
from ktmoe.errors import InputError
from ktmoe.quantization.rules import Rule

#: The element of each target, by its name.
_ELEMENTS = {"mxfp4": "E2M1", "mxfp8": "E4M3"}


def block_rule(rule: Rule) -> core.BlockRule:
    """What rounds by a rule. Raises InputError for a rule of a format that has other blocks."""
    if rule.target not in _ELEMENTS:
        raise InputError(f"a rule of {' or '.join(_ELEMENTS)} rounds blocks, found one of {rule.target}, {rule.name!r}")
    up, down = rule.steps.fractions(7)
    return core.BlockRule(_ELEMENTS[rule.target], up, down, rule.steps.zeros, rule.ties, rule.negative_zero)
