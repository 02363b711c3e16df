"""Rule: how weights become codes and scales. Every rule is a row of data here, with its public source by name.

docs/quantizing.md says the same in words, docs/numerics.md how far a weight can move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ktmoe.quantization import steps
from ktmoe.quantization.steps import Groups, PowerOfTwo, Share, Steps

#: How a weight w becomes a quotient t: rounded to float32, w / s; w * (1 / s), that too; w * (16 / s), that too, which is then
#: rounded to an integer, ties to even, and divided by 16; w / s in float64.
QUOTIENTS = ("divided", "inverse", "sixteenths", "float64")
#: Which of two values that are equally near a quotient is taken: the one with an even code, the larger or the smaller size.
TIES = ("even", "away", "zero")


@dataclass(frozen=True)
class Rule:
    """How weights are rounded.

    target: what to, one of TARGETS. name: of the rule. source: whose it is. steps: groups' scales.
    quotient: one of QUOTIENTS. ties: one of TIES. least, most: codes beyond are set to these; None: the element's own.
    negative_zero: whether a negative weight that becomes zero keeps its sign, in elements that have such a zero.
    points: whether it has zero points. group: the only one that it is for, or None.
    """

    target: str
    name: str
    source: str
    steps: Callable[[Groups], Steps]
    quotient: str = "divided"
    ties: str = "even"
    least: int | None = None
    most: int | None = None
    negative_zero: bool = True
    points: bool = False
    group: object = None
    kind: str | None = None


_E2M1, _E4M3 = 6.0, 448.0
_ALL = (
    Rule("mxfp4", "ceil", "ModelOpt's and DeepSeek's scale; the OCP MX specification's elements", steps.ceil(_E2M1)),
    Rule("mxfp4", "round", "the nearest power of two", steps.nearest(_E2M1)),
    Rule("mxfp4", "even", "compressed-tensors", steps.even(_E2M1, 1)),
    Rule("mxfp4", "quark", "Quark", steps.even(_E2M1, 1, zeros=1), negative_zero=False),
    Rule("mxfp4", "floor", "OCP MX specification 1.0, 6.3", steps.floor(_E2M1)),
    Rule("mxfp4", "gguf", "gguf, llama.cpp", steps.floor(_E2M1), ties="zero", negative_zero=False),
    Rule("mxfp4", "modelopt", "ModelOpt's MXFP4QTensor", steps.ceil(_E2M1), ties="zero"),
    Rule("mxfp8", "ceil", "ModelOpt's MXFP8QTensor, DeepSeek", steps.ceil(_E4M3)),
    Rule("mxfp8", "round", "the nearest power of two", steps.nearest(_E4M3)),
    Rule("mxfp8", "even", "Quark", steps.even(_E4M3, 3)),
    Rule("mxfp8", "floor", "OCP MX specification 1.0, 6.3", steps.floor(_E4M3)),
    Rule("mxfp8", "compressed-tensors", "compressed-tensors", steps.even(_E4M3, 1)),
    Rule("nvfp4", "modelopt", "ModelOpt's NVFP4QTensor", steps.in_matrix),
    Rule("nvfp4", "compressed-tensors", "compressed-tensors", steps.in_matrix_divided),
    Rule("fp8", "up", "ktmoe: nothing saturates", Share(448, up=True)),
    Rule("fp8", "nearest", "DeepSeek-V3's inference code, ModelOpt's FP8QTensor, compressed-tensors", Share(448)),
    Rule("fp8", "transformers", "transformers' Fp8Quantize", steps.inverted, quotient="inverse"),
    Rule("int8", "symmetric", "as vLLM and SGLang round INT8 per row", Share(127), least=-127, most=127),
    Rule("int8", "compressed-tensors", "compressed-tensors", Share(127.5, zeros=2.0**-7), least=-128, most=127),
    Rule("int8", "gguf", "gguf's Q8_0", Share(127, late=True, zeros=0), "inverse", "away", -127, 127, group=32, kind="fp16"),
    Rule(
        "int8", "amxint8", "kt-kernel's AMXINT8", Share(127, inverse=True, zeros=0), "inverse", "even", -127, 127, group="row"
    ),
    Rule("int8", "moe_int8", "kt-kernel's MOE_INT8", Share(127, zeros=0), "divided", "away", -127, 127, group="row"),
    Rule("int4", "symmetric", "codes of equal size on both sides of zero", Share(7), least=-7, most=7),
    Rule("int4", "compressed-tensors", "compressed-tensors", Share(7.5, zeros=2.0**-7), least=-8, most=7),
    Rule("int4", "asymmetric", "compressed-tensors", steps.between, least=-8, most=7, points=True),
    Rule("int4", "amxint4", "kt-kernel's AMXINT4", Share(7, zeros=0), "sixteenths", "away", -7, 7, group="row"),
    Rule("int4", "moe_int4", "kt-kernel's MOE_INT4", Share(7, zeros=0), "float64", "away", -7, 7, group="row"),
)
#: (target, name): Rule. The first one of a target is its default.
RULES = {(rule.target, rule.name): rule for rule in _ALL}

__all__ = ["QUOTIENTS", "RULES", "TIES", "PowerOfTwo", "Rule"]
