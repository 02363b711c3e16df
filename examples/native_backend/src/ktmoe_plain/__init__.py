"""Backend plain: MXFP4 in C without an intrinsic, for any CPU."""

from ktmoe._native import core
from ktmoe.backends.native import NativeBackend
from ktmoe_plain import plain


def load(isa: str) -> core.KernelTable:
    """For kernels of AVX2, ktmoe.backends.native.require(isa, "avx2", "fma") would come first."""
    return core.KernelTable(plain.table)


#: Its rank is below every built-in backend's, so that "auto" does not take it.
backend = NativeBackend({"bf16": ("plain",)}, load, rank=50)
