"""Backend fp32_lut: a table lookup to fp32, then multiply and add. Runs on any CPU; fast with AVX-512."""

from ktmoe.backends import registry
from ktmoe.backends.native import NativeBackend

registry.register("fp32_lut", NativeBackend({"bf16": ("avx512f", "portable"), "int8": ("avx512_vnni",)}, forms=("int8",)))
