"""Backend fp32_lut: a table lookup to fp32, then multiply and add. Runs on any CPU; fast with AVX-512."""

from types import MappingProxyType

from ktmoe.backends import registry
from ktmoe.backends.native import NativeBackend


class Fp32Lut(NativeBackend):
    isas = ("avx512f", "portable")
    activations = ("bf16", "int8")
    also = MappingProxyType({"int8": ("avx512_vnni",)})


registry.register("fp32_lut", Fp32Lut())
