"""The one table of instruction sets: what compiles a kernel folder and what a CPU needs to run it.

setup.py reads it for compile flags, the backends for CPU requirements, the docs and tests for both.
"""

from __future__ import annotations

from dataclasses import dataclass

#: For every C file. Numerics: no contraction of a * b + c, whose rounding the contract fixes; GCC contracts intrinsics, too.
C_FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread")


@dataclass(frozen=True)
class Isa:
    """An instruction set.

    flags: the compiler's, for kernels/<name>/*.c and nothing else. requires: CPU features, as core.cpu_features() names them.
    implies: rows of ISAS whose features and flags come with it.
    """

    flags: tuple[str, ...]
    requires: tuple[str, ...]
    implies: tuple[str, ...] = ()


ISAS = {
    "portable": Isa(flags=(), requires=()),
    "avx512_bf16": Isa(
        flags=("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mfma"),
        requires=("avx512f", "avx512bw", "avx512vl", "avx512_bf16", "fma"),
        implies=("portable",),
    ),
}


def compile_flags(name: str) -> tuple[str, ...]:
    """All flags for a row's kernels, implied rows included."""
    return sum((compile_flags(other) for other in ISAS[name].implies), ()) + ISAS[name].flags


def required_features(name: str) -> tuple[str, ...]:
    """All CPU features that a row's kernels need, implied rows included."""
    return sum((required_features(other) for other in ISAS[name].implies), ()) + ISAS[name].requires
