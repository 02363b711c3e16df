"""Measures a layer against the machine.

A speed alone says little on a machine that others share. So each round measures the read bandwidth, on the same pages as
the packed weights, and the multiply peak, both with the pool's own threads, and then the call; what counts is the median
over rounds of the call's share of that round's limits. `ktmoe demo`, `ktmoe bench` and `make bench` measure with this package.
`ktmoe.measuring.limits` has what a machine allows a model whose weights are not read, `ktmoe.measuring.speed` how fast its
layers can be then, `ktmoe.measuring.token_bytes` what a token reads of a model, `ktmoe.measuring.inspection` the rest of
`ktmoe inspect`.
"""

from ktmoe.measuring.batches import SKEW, MeasuredBatch, random_batches, slot_flops
from ktmoe.measuring.correctness import Check, backends_for, check
from ktmoe.measuring.meter import LEAST_SECONDS, STREAMS, LimitMeter, settled
from ktmoe.measuring.rounds import MOST_SECONDS, SHARE_OF_CALL, Result, Rounds, run

__all__ = [
    "LEAST_SECONDS",
    "MOST_SECONDS",
    "SHARE_OF_CALL",
    "SKEW",
    "STREAMS",
    "Check",
    "LimitMeter",
    "MeasuredBatch",
    "Result",
    "Rounds",
    "backends_for",
    "check",
    "random_batches",
    "run",
    "settled",
    "slot_flops",
]
