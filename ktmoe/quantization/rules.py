"""Rule: how weights become codes and scales. Every rule is a row of data here, with its public source by name.

docs/quantizing.md has these rows as a table, docs/numerics.md says how far a weight can move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ktmoe.quantization import steps
from ktmoe.quantization.steps import Share

#: How a weight w and a step s become a quotient t.
QUOTIENTS = {
    "divided": "w / s, rounded to float32",
    "inverse": "w * (1 / s), each rounded to float32",
    "sixteenths": "w * (16 / s), each rounded to float32, to the nearest integer, ties to even; a sixteenth of that",
    "float64": "w / s, rounded to float64",
}
#: The ways to choose between two values that are equally near to t: which one is taken.
TIES = {"even": "the even code", "away": "the larger size", "zero": "the smaller size"}


@dataclass(frozen=True)
class Rule:
    """How weights are rounded.

    target: what to, one of TARGETS. name: of the rule. steps: what scales groups have; scale and zeros: that in words, M being
    a group's largest magnitude, and what a group of zeros has. source: whose rule it is.
    quotient: one of QUOTIENTS. ties: one of TIES; of "sixteenths" and "float64", the only one is "away".
    codes: the least and the most; others are set to these; None: the element's own.
    negative_zero: whether a negative weight that becomes zero keeps its sign, in elements that have such a zero.
    zero_signed: whether a quotient that is zero keeps its sign, in E2M1.
    points: whether there are zero points. group, kind: the only ones that it is for, or None.

    Examples:
        >>> RULES["mxfp4", "ceil"].scale
        '2^ceil(log2(M / 6))'
    """

    target: str
    name: str
    steps: Any
    scale: str
    zeros: str
    source: str
    quotient: str = "divided"
    ties: str = "even"
    codes: tuple[int, int] | None = None
    negative_zero: bool = True
    zero_signed: bool = True
    points: bool = False
    group: int | str | None = None
    kind: str | None = None


def _mx(target: str, largest: float, power: int) -> tuple[Rule, ...]:
    """The rules that MXFP4 and MXFP8 have alike. largest: the element's; 2^power is the largest power of two in it."""
    share = f"M / {largest:.0f}"
    ceil, floor = f"2^ceil(log2({share}))", f"2^(floor(log2 M) - {power})"
    return (
        Rule(target, "ceil", steps.ceil(largest), ceil, "byte 0", "torchao's RCEIL, ModelOpt's scales, DeepSeek"),
        Rule(target, "round", steps.nearest(largest), f"2^round(log2({share}))", "byte 0", "ktmoe"),
        Rule(target, "floor", steps.floor(largest), floor, "byte 0", "OCP MX 1.0 section 6.3; torchao's FLOOR, microxcaling"),
    )


def _even(target: str, name: str, bits: int, source: str, zeros: int = 0, **more: Any) -> Rule:
    largest, power = (6.0, 2) if target == "mxfp4" else (448.0, 8)
    words = f"2^(floor(log2 M') - {power}), M' = M rounded to {bits} bit{'s' * (bits > 1)} behind the first, ties up"
    return Rule(target, name, steps.even(largest, bits, zeros), words, f"byte {zeros}", source, **more)


_ALL = (
    *_mx("mxfp4", 6.0, 2),
    _even("mxfp4", "even", 1, "torchao's EVEN, compressed-tensors"),
    _even("mxfp4", "quark", 1, "Quark", zeros=1, negative_zero=False),
    Rule("mxfp4", "modelopt", steps.ceil(6.0), "2^ceil(log2(M / 6))", "byte 0", "ModelOpt", ties="zero"),
    Rule(
        *("mxfp4", "gguf", steps.floor(6.0), "2^(floor(log2 M) - 2)", "byte 0", "gguf's MXFP4, llama.cpp"),
        ties="zero",
        negative_zero=False,
    ),
    *_mx("mxfp8", 448.0, 8),
    _even("mxfp8", "even", 3, "torchao's EVEN"),
    _even("mxfp8", "compressed-tensors", 1, "compressed-tensors"),
    Rule(
        *("nvfp4", "modelopt", steps.in_matrix),
        "f = M of the matrix / 2688; E4M3 nearest to M / (6 f), from 2^-9; s = E4M3 * f",
        *("1", "ModelOpt"),
        zero_signed=False,
    ),
    Rule(
        *("nvfp4", "compressed-tensors", steps.in_matrix_divided),
        "g = 2688 * (1 / M of the matrix); E4M3 nearest to g * (M / 6), 1/8 where that is 0; s = E4M3 / g",
        *("1/8", "compressed-tensors"),
        zero_signed=False,
    ),
    Rule("fp8", "up", Share(448, up=True), "the least number s with 448 s >= M", "1", "ktmoe"),
    Rule("fp8", "nearest", Share(448), "M / 448", "1", "DeepSeek-V3, ModelOpt, compressed-tensors"),
    Rule(
        *("fp8", "transformers", steps.inverted, "1 / (448 * (1 / M)); t = w * (448 * (1 / M))", "1", "transformers"),
        quotient="inverse",
    ),
    Rule("int8", "symmetric", Share(127), "M / 127", "1", "ktmoe", codes=(-127, 127)),
    Rule(
        *("int8", "compressed-tensors", Share(127.5, zeros=2.0**-7), "M / 127.5", "2^-7", "compressed-tensors"),
        codes=(-128, 127),
    ),
    Rule(
        *(
            "int8",
            "gguf",
            Share(127, late=True, zeros=0),
            "s = M / 127; stored as fp16 afterwards",
            "0",
            "gguf's Q8_0, llama.cpp",
        ),
        *("inverse", "away", (-127, 127)),
        group=32,
        kind="fp16",
    ),
    Rule(
        *("int8", "amxint8", Share(127, inverse=True, zeros=0), "M * (1 / 127)", "0", "kt-kernel's AMXINT8"),
        *("inverse", "even", (-127, 127)),
        group="row",
    ),
    Rule(
        *("int8", "moe_int8", Share(127, zeros=0), "M / 127", "0", "kt-kernel's MOE_INT8"),
        *("divided", "away", (-127, 127)),
        group="row",
    ),
    Rule("int4", "symmetric", Share(7), "M / 7", "1", "ktmoe", codes=(-7, 7)),
    Rule("int4", "compressed-tensors", Share(7.5, zeros=2.0**-7), "M / 7.5", "2^-7", "compressed-tensors", codes=(-8, 7)),
    Rule(
        *("int4", "asymmetric", steps.between),
        "(high - low) / 15, low <= 0 <= high; zero point: the integer nearest to -8 - low / s, ties to even, added to t",
        *("2^-7 for bf16", "compressed-tensors"),
        codes=(-8, 7),
        points=True,
    ),
    Rule(
        *("int4", "amxint4", Share(7, zeros=0), "M / 7", "0", "kt-kernel's AMXINT4"),
        *("sixteenths", "away", (-7, 7)),
        group="row",
    ),
    Rule(
        *("int4", "moe_int4", Share(7, zeros=0), "M / 7", "0", "kt-kernel's MOE_INT4"),
        *("float64", "away", (-7, 7)),
        group="row",
    ),
)
#: (target, name): Rule. The first one of a target is its default.
RULES = {(rule.target, rule.name): rule for rule in _ALL}
