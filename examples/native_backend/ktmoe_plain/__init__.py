"""Backend plain: MXFP4 in C without an intrinsic, for any CPU."""

from ktmoe._native import core
from ktmoe.backends.native import NativeBackend
from ktmoe_plain import plain


class Plain(NativeBackend):
    """Below every built-in backend, so that "auto" does not take it."""

    rank = 50
    isas = ("plain",)

    def missing(self, isa: str) -> list[str]:
        return []  # for kernels of AVX2: [f for f in ("avx2", "fma") if not core.cpu_features().get(f)]

    def load(self, isa: str) -> core.KernelTable:
        return core.KernelTable(plain.table)


backend = Plain()
