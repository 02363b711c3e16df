"""Builds the native modules. Every C file is compiled for baseline x86-64; only kernels/<isa>/*.c get that ISA's flags."""

import runpy
import tempfile
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("ktmoe/_native")
DRIVER = sorted(NATIVE.glob("*.c"))
ISA = runpy.run_path(str(NATIVE / "isa.py"))  # by its path, since the package is not built yet
FLAGS = list(ISA["C_FLAGS"])


class BuildNative(build_ext):
    """Compiles the C beside the Cython modules: the driver for the baseline, a kernel folder with its ISA's flags.

    An ISA that the compiler does not know is dropped, visibly.
    """

    def build_extensions(self):
        kept = []
        for extension in self.extensions:
            name = extension.name.rpartition(".")[2]
            sources, flags = DRIVER, []
            if name in ISA["ISAS"]:
                sources, flags = sorted((NATIVE / "kernels" / name).glob("*.c")), list(ISA["compile_flags"](name))
            if not self.compiler_accepts(flags):
                print(f"ktmoe: this compiler does not know {' '.join(flags)}: built WITHOUT {name}")
                continue
            extension.extra_objects = self.compiler.compile(
                [str(source) for source in sources],
                output_dir=self.build_temp,
                include_dirs=[str(NATIVE)],
                extra_postargs=[*FLAGS, "-Wall", "-Wextra", *flags],
            )
            kept.append(extension)
        self.extensions = kept
        super().build_extensions()

    def compiler_accepts(self, flags):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("int probe;\n")
            try:
                self.compiler.compile([str(source)], output_dir=folder, extra_postargs=[*flags, "-Werror"])
            except Exception:  # each compiler class has an exception of its own
                return False
        return True


def extension(name):
    return Extension(
        f"ktmoe._native.{name}",
        [str(NATIVE / f"{name}.pyx")],
        include_dirs=[str(NATIVE)],
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread"],
        depends=[str(path) for pattern in ("*.h", "*.c", "*.pxd", "*.pxi") for path in NATIVE.rglob(pattern)],
    )


setup(
    ext_modules=cythonize([extension(name) for name in ("core", *ISA["ISAS"])], build_dir="build/cython"),
    cmdclass={"build_ext": BuildNative},
)
