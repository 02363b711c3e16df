"""Backend avx2: CPUs with AVX2 and FMA, which is almost all since 2015."""

from ktmoe.backends import registry
from ktmoe.backends.native import NativeBackend

registry.register(
    "avx2", NativeBackend({"int16": ("avx_vnni", "avx2"), "bf16": ("avx2",), "int8": ("avx_vnni", "avx2")}, forms=("int8",))
)
