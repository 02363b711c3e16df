"""The one table of instruction sets: the kernel files of each, the compiler's flags for them, and what a CPU needs to run them.

setup.py reads it for what to compile, the backends for CPU requirements, the tests for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: For every C file. Numerics: no contraction of a * b + c, whose rounding the contract fixes; GCC contracts intrinsics, too.
C_FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread")


@dataclass(frozen=True)
class Isa:
    """An instruction set.

    rank: how fast its kernels are beside the others' on the CPUs that have it; a backend ranks as the best that it can use.
    rank_with: (CPU feature, the rank on CPUs that have that, too), the first that applies.
    kernels: files of kernels/, one for each idea. Each is compiled for this row, with KT_ISA defined as its name, unless it is
        in shared.
    shared: files of kernels and COMMON whose object an implied row has: this row's flags would change nothing in them.
    operands: kernels of which only transpose() is compiled for this row, since training's operand differs; few() and many() are
        an implied row's.
    flags: the compiler's, for these objects and nothing else. requires: CPU features, as core.cpu_features() names them.
    implies: rows of ISAS whose features and flags come with it.
    """

    rank: int
    kernels: tuple[str, ...]
    flags: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    implies: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    operands: tuple[str, ...] = ()
    rank_with: tuple[tuple[str, int], ...] = ()


#: The kernels for rows of integers on vectors of 256 bits.
_OF_INTEGERS = ("q4_int16", "q4_wide_int16", "grid_int16", "int_int16", "q4_int8", "q4_wide_int8", "grid_int8", "int_int8")

ISAS = {
    "portable": Isa(100, kernels=("q4_f32", "grid_f32", "f8_f32", "int_f32", "b16_f32", "f16_f32", "f32_f32")),
    "avx2": Isa(
        200,
        kernels=(
            "q4_f32",
            "grid_f32",
            "f8_f32",
            "int_f32",
            "b16_f32",
            "f16_f32",
            "f32_f32",
            *_OF_INTEGERS,
        ),
        flags=("-mavx2", "-mfma"),
        requires=("avx2", "fma"),
        implies=("portable",),
    ),
    "avx_vnni": Isa(
        210,
        kernels=_OF_INTEGERS,
        flags=("-mavxvnni",),
        requires=("avx_vnni",),
        implies=("avx2",),
        shared=("activation", "dense"),
    ),
    "avx512f": Isa(
        250,
        kernels=("q4_f32", "grid_f32", "f8_f32", "int_f32", "b16_f32", "f16_f32", "f32_f32"),
        flags=("-mavx512f",),
        requires=("avx512f",),
        implies=("avx2",),
    ),
    "avx512_vnni": Isa(
        260,
        kernels=("q4_int8", "q4_wide_int8", "grid_int8", "int_int8"),
        flags=("-mavx512bw", "-mavx512vnni"),
        requires=("avx512bw", "avx512_vnni"),
        implies=("avx512f",),
    ),
    "avx512_bf16": Isa(
        300,
        # Weights of fp16 and fp32 are no bfloat16 numbers.
        kernels=("q4_bf16", "grid_bf16", "f8_bf16", "int_bf16", "b16_bf16", "f16_f32", "f32_f32"),
        flags=("-mavx512bw", "-mavx512vl", "-mavx512bf16"),
        requires=("avx512bw", "avx512vl", "avx512_bf16"),
        implies=("avx512f",),
        shared=("f32_f32",),
        operands=("f16_f32",),
        # Intel's cores with AMX start a VDPBF16PS every second cycle and two FMAs every cycle: half the FLOPs (measured).
        # Where a hypervisor hides AMX, AVX512_FP16 tells them.
        rank_with=(("amx_tile", 225), ("avx512_fp16", 225)),
    ),
    "amx": Isa(
        400,
        # Scales of q4 and int that are not in weights multiply fp32 sums of scale groups: on CPUs with AMX, FMAs beat
        # VDPBF16PS. Records of a grid become q4's blocks by instructions that avx512f does not have.
        # Weights of fp16 and fp32 are no bfloat16 numbers.
        kernels=(
            "q4_amx",
            "q4_amx_products",
            "q4_amx_terms",
            "f8_amx",
            "int_amx",
            "b16_amx",
            "q4_f32",
            "grid_f32",
            "int_f32",
            "f16_f32",
            "f32_f32",
        ),
        flags=("-mavx512vbmi", "-mgfni", "-mamx-tile", "-mamx-bf16"),
        requires=("avx512vbmi", "gfni", "amx_tile", "amx_bf16"),
        implies=("avx512_bf16",),
        shared=("f32_f32", "activation", "dense", "rows"),
        operands=("q4_f32", "int_f32", "f16_f32"),
    ),
}

#: Folders of C files that are compiled once, for every CPU; each includes only those before it.
DRIVER = ("base", "pack", "quantize", "layer", "forward", "backward", "captured")

#: What every row is compiled from besides: its table, the activation, products of adapters, rows as kernels take them, the
#: machine's limits.
COMMON = ("table", "activation", "dense", "rows", "limits")


def rank(name: str, features: Mapping[str, bool]) -> int:
    """A row's rank on a CPU with these features, {name: whether it has it}."""
    return next((rank for feature, rank in ISAS[name].rank_with if features.get(feature)), ISAS[name].rank)


def compile_flags(name: str) -> tuple[str, ...]:
    """All flags for a row's kernels, implied rows included."""
    return sum((compile_flags(other) for other in ISAS[name].implies), ()) + ISAS[name].flags


def required_features(name: str) -> tuple[str, ...]:
    """All CPU features that a row's kernels need, implied rows included."""
    return sum((required_features(other) for other in ISAS[name].implies), ()) + ISAS[name].requires


def sources(name: str) -> tuple[str, ...]:
    """All files of kernels/ that are compiled for a row."""
    return tuple(source for source in ISAS[name].kernels + COMMON if source not in ISAS[name].shared)


def compiled_for(name: str, source: str) -> str:
    """The row whose object of a file of kernels/ serves a row: itself, or one that it implies."""
    return compiled_for(nearest(name, source), source) if source in ISAS[name].shared else name


def loops_of(name: str, source: str) -> str:
    """The row whose few() and many() of a kernel file serve a row."""
    owner = compiled_for(name, source)
    return loops_of(nearest(owner, source), source) if source in ISAS[owner].operands else owner


def rows_of(name: str, source: str) -> str:
    """The row whose object of rows.c a kernel file of a row names: that of its loops. Those of fp32 name one object, that of
    f32_f32, so that x is encoded once."""
    first = "f32_f32" if source.endswith("_f32") and "f32_f32" in ISAS[name].kernels else source
    return compiled_for(loops_of(name, first), "rows")


def nearest(name: str, source: str) -> str | None:
    """The nearest row that a row implies, and that has a file of kernels/."""
    for other in ISAS[name].implies:
        if found := other if source in ISAS[other].kernels + COMMON else nearest(other, source):
            return found
    return None


def definitions(name: str, source: str) -> tuple[str, ...]:
    """What the compiler is told of a row besides its flags: whose objects it uses. Only the table has to know the kernels'."""
    loops = loops_of(name, source)
    owners = (f"-DKT_{common.upper()}={compiled_for(name, common)}" for common in ("activation", "dense"))
    flags = (f"-DKT_ISA={name}", f"-DKT_SOURCE={source}", f"-DKT_ROWS={rows_of(name, source)}", *owners)
    if source in ISAS[name].operands:
        return (*flags, f"-DKT_LOOPS={loops}")
    if source != "table":
        return flags
    kernels = " ".join(f"X({kernel}, {compiled_for(name, kernel)})" for kernel in ISAS[name].kernels)
    return (*flags, f"-DKT_KERNELS={kernels}")
