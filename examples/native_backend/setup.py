"""Compiles the Cython module and the kernels beside it against the headers of the ktmoe that is installed."""

from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

import ktmoe

HEADERS = Path(ktmoe.get_include())
KERNELS = Path("kernels/plain")

plain = Extension(
    "ktmoe_plain.plain",
    ["src/ktmoe_plain/plain.pyx", *sorted(str(source) for source in KERNELS.glob("*.c"))],
    include_dirs=[str(HEADERS), "."],
    depends=[str(header) for header in KERNELS.glob("*.h")],
    # No contraction of a * b + c: a compiler that may use FMA would round differently from one build to the next.
    extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
)
# include_path: where Cython looks for ktmoe/_native/ktmoe.pxd; it would not find that of an editable install by itself.
setup(ext_modules=cythonize(plain, include_path=[str(HEADERS.parents[1])], build_dir="build/cython"))
