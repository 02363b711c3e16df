"""Backend amx: TDPBF16PS on tiles of weights decoded to bf16. Intel Xeon from Sapphire Rapids on."""

from ktmoe.backends import registry
from ktmoe.backends.native import NativeBackend


class Amx(NativeBackend):
    isas = ("amx",)
    activations = ("bf16", "int8")
    also = {"int8": ("avx512_vnni",)}


registry.register("amx", Amx())
