"""Backend amx: TDPBF16PS on tiles of weights decoded to bf16. Intel Xeon from Sapphire Rapids on."""

from ktmoe.backends import registry
from ktmoe.backends.native import NativeBackend

registry.register("amx", NativeBackend({"bf16": ("amx",), "int8": ("avx512_vnni",)}))
