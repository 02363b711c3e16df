"""Builds ktmoe._native.core: the Cython module, the driver for baseline x86-64, and every kernel file once for each instruction
set whose row in isa.py lists it, with that row's flags.

Objects are compiled side by side and kept under build/native. One is compiled again if its source, a header that it includes or
its command changed.
"""

import os
import runpy
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("ktmoe/_native")
OBJECTS = Path("build/native")
ROOMS = ("base", "pack", "layer", "forward")
ISA = runpy.run_path(str(NATIVE / "isa.py"))  # by its path, since the package is not built yet


class BuildNative(build_ext):
    """An instruction set that the compiler does not know is dropped, visibly."""

    def build_extension(self, extension):
        known = [name for name in ISA["ISAS"] if self.compiler_accepts(name)]
        tables = f"-DKT_ISAS={' '.join(f'X({name})' for name in known)}"
        # The Cython module comes first, since it takes longest. It waits for locks and calls C: -O3 gains nothing.
        jobs = [(Path(extension.sources[0]), "python", ("-O2",))]
        jobs += [(NATIVE / f"kernels/{source}.c", name, ISA["compile_flags"](name) + ISA["definitions"](name, source))
                 for name in known for source in ISA["sources"](name)]  # fmt: skip
        jobs += [(source, "driver", ()) for room in ROOMS for source in sorted((NATIVE / room).glob("*.c"))]
        jobs.append((NATIVE / "kernels/isas.c", "driver", (tables,)))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: self.compiled(*job), jobs))
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), extra_postargs=["-pthread"])

    def compiled(self, source, folder, flags):
        """The object of a source, compiled now if need be. folder: below OBJECTS."""
        target = OBJECTS / folder / source.parent.name / f"{source.stem}.o"
        log, needs = target.with_suffix(".cmd"), target.with_suffix(".d")
        includes = [f"-I{path}" for path in (NATIVE, *self.include_dirs)]
        command = [*self.compiler.compiler_so, *includes, *ISA["C_FLAGS"], "-Wall", "-Wextra", *flags]
        command += ["-MMD", "-MF", str(needs), "-c", str(source), "-o", str(target)]
        if not (log.exists() and log.read_text() == shlex.join(command) and fresh(target, needs)):
            log.unlink(missing_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            print(shlex.join(command))
            subprocess.run(command, check=True)
            log.write_text(shlex.join(command))
        return str(target)

    def compiler_accepts(self, isa):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("int probe;\n")
            flags = ISA["compile_flags"](isa)
            try:
                self.compiler.compile([str(source)], output_dir=folder, extra_postargs=[*flags, "-Werror"])
            except Exception:  # each compiler class has an exception of its own
                print(f"ktmoe: this compiler does not know {' '.join(flags)}: built WITHOUT {isa}")
                return False
        return True


def fresh(target, needs):
    """Whether an object is younger than all that it was made of."""
    try:
        made = target.stat().st_mtime_ns
        files = needs.read_text().replace("\\\n", " ").partition(": ")[2].split()
        return all(Path(file).stat().st_mtime_ns <= made for file in files)
    except OSError:
        return False


core = Extension("ktmoe._native.core", [str(NATIVE / "python/core.pyx")])
core.depends = [str(path) for pattern in ("*.[ch]", "*.p[xy][dix]") for path in sorted(NATIVE.rglob(pattern))]  # for an sdist
setup(ext_modules=cythonize([core], build_dir="build/cython"), cmdclass={"build_ext": BuildNative})
