"""Backend avx512_bf16: VDPBF16PS on weights decoded to bf16, exactly. Zen 4 and later; Cooper Lake; Sapphire Rapids on."""

from ktmoe.backends import registry
from ktmoe.backends.native import NativeBackend

registry.register("avx512_bf16", NativeBackend({"bf16": ("avx512_bf16",), "int8": ("avx512_vnni",)}))
