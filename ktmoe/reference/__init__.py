"""The routed experts in float64, and rigorous bounds on a backend's error: the oracle that tests and benchmarks compare with.

Nothing here is shared with a kernel. docs/numerics.md is the text that it follows. `ktmoe.reference.training` has the forward
and the backward pass of training, `ktmoe.reference.gradients` the same without a rounding.
"""

from ktmoe.dequantization import dequantize
from ktmoe.experts import ROUTER_WEIGHTS
from ktmoe.reference.activation import ACTIVATION_ROUNDINGS, EXP_RELATIVE_ERROR, activate
from ktmoe.reference.errors import MAX_FLOAT32, UNIT
from ktmoe.reference.linear_map import linear
from ktmoe.reference.moe import ROUNDING, TUNED_FOR, Reference, forward
from ktmoe.reference.operands import operand
from ktmoe.reference.weights import BLOCK, TINY, folds, integer_unit, round_bfloat16, splits

__all__ = [
    "ACTIVATION_ROUNDINGS",
    "BLOCK",
    "EXP_RELATIVE_ERROR",
    "MAX_FLOAT32",
    "ROUNDING",
    "ROUTER_WEIGHTS",
    "TINY",
    "TUNED_FOR",
    "UNIT",
    "Reference",
    "activate",
    "dequantize",
    "folds",
    "forward",
    "integer_unit",
    "linear",
    "operand",
    "round_bfloat16",
    "splits",
]
