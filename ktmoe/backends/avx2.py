"""Backend avx2: CPUs with AVX2 and FMA, which is almost all since 2015."""

from types import MappingProxyType

from ktmoe.backends import registry
from ktmoe.backends.native import NativeBackend


class Avx2(NativeBackend):
    isas = ("avx2",)
    activations = ("int16", "bf16", "int8")
    also = MappingProxyType(dict.fromkeys(("int16", "int8"), ("avx_vnni", "avx2")))


registry.register("avx2", Avx2())
