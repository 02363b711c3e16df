"""Backend avx512_bf16: VDPBF16PS on weights decoded to bf16, exactly. Zen 4 and later; Cooper Lake; Sapphire Rapids on."""

from types import MappingProxyType

from ktmoe.backends import registry
from ktmoe.backends.native import NativeBackend


class Avx512Bf16(NativeBackend):
    isas = ("avx512_bf16",)
    activations = ("bf16", "int8")
    also = MappingProxyType({"int8": ("avx512_vnni",)})


registry.register("avx512_bf16", Avx512Bf16())
