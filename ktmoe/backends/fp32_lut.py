"""Backend fp32_lut: a table lookup to fp32, then multiply and add. Runs on any CPU."""

from ktmoe.backends import registry
from ktmoe.backends.native import NativeBackend


class Fp32Lut(NativeBackend):
    rank = 100
    isas = ("portable",)


registry.register("fp32_lut", Fp32Lut())
