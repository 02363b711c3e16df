"""Loader iq4_nl: 4-bit codes of a table of 16 numbers, as llama.cpp's IQ4_NL has them, with a scale per 32.

An expert's tensors are {base}.{E}.{gate,up,down}_proj or {base}.{E}.{w1,w3,w2} and

    codes   U8 [N, K/2], two codes a byte, high nibble = even k
    scales  F16 [N, K/32]
"""

from __future__ import annotations

from ktmoe.loaders.per_expert import PerExpert
from ktmoe.loaders.scheme import Endings, Headers, Scheme
from ktmoe.weights.elements import Element
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.order import Order
from ktmoe.weights.scales import Scale

_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_NL = WeightFormat(
    Element("IQ4_NL", "q4", tuple(map(float, _TABLE))),
    Scale("fp16", (1, 32)),
    order=Order("high first", nibbles=(1, 0, 3, 2, 5, 4, 7, 6)),
)


class Iq4Nl(Scheme):
    stored = (Endings({"codes": ".codes", "scales": ".scales"}),)

    def format(self, headers: Headers) -> WeightFormat:
        return IQ4_NL


loader = PerExpert(Iq4Nl(), "IQ4_NL")
