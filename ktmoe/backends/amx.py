"""Backend amx: TDPBF16PS on tiles of weights decoded to bf16. Intel Xeon from Sapphire Rapids on."""

from types import MappingProxyType

from ktmoe.backends import registry
from ktmoe.backends.native import NativeBackend


class Amx(NativeBackend):
    isas = ("amx",)
    activations = ("bf16", "int8")
    also = MappingProxyType({"int8": ("avx512_vnni",)})


registry.register("amx", Amx())
