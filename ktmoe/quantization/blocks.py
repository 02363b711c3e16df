"""A rule of an MX format as the native code has it that rounds blocks of 32 bfloat16 numbers: activations."""

from __future__ import annotations

from ktmoe._native import core
from ktmoe.errors import InputError
from ktmoe.quantization.rules import Rule
from ktmoe.weights.elements import E2M1, E4M3

#: What blocks of 32 may be rounded to, with its element.
ELEMENTS = {"mxfp4": E2M1, "mxfp8": E4M3}


def block_rule(rule: Rule) -> core.BlockRule:
    """What rounds by a rule. Raises InputError for a rule of a format that has other blocks.

    Examples:
        >>> codes, scales = block_rule(RULES["mxfp8", "ceil"]).quantize(np.zeros((1, 32), np.uint16))
        >>> codes.shape, scales.shape
        ((1, 32), (1, 1))
    """
    if rule.target not in ELEMENTS:
        raise InputError(f"a rule of {' or '.join(ELEMENTS)} rounds blocks, found one of {rule.target}, {rule.name!r}")
    up, down = rule.steps.fractions(7)
    return core.BlockRule(ELEMENTS[rule.target].name, up, down, rule.steps.zeros, rule.ties, rule.negative_zero)
