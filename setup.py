"""Builds ktmoe._native.core: the Cython module, the driver for baseline x86-64, and every kernel file for each instruction set
whose row in isa.py lists it, with that row's flags, unless the row shares an implied row's object.

Objects are compiled side by side and kept under build/native. One is compiled again if its source, a header that it includes,
its command or the compiler changed. Beside it stands what the compiler said, for tools/lint_c.py.
"""

import functools
import hashlib
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("ktmoe/_native")
OBJECTS = Path("build/native")
OWN_CFLAGS = shlex.split(os.environ.get("CFLAGS", ""))
#: What C sources are compiled with that know nothing of Python, in the place of Python's own flags: all versions share the
#: objects.
WITHOUT_PYTHON = ("-DNDEBUG", "-fwrapv", "-fPIC")
#: The folder of what is compiled for one Python.
PYTHON = f"python/{sysconfig.get_config_var('SOABI')}"
ISA = runpy.run_path(str(NATIVE / "isa.py"))  # by its path, since the package is not built yet


class BuildNative(build_ext):
    """An instruction set that the compiler does not know is dropped, visibly."""

    user_options: ClassVar = [
        *build_ext.user_options,
        ("objects=", None, "keep the objects in this folder instead"),
        ("last-flags=", None, "flags behind all others, of the compiler and of the linker"),
        ("isas=", None, "only these rows of isa.py, with commas between"),
    ]

    def initialize_options(self):
        super().initialize_options()
        self.objects, self.last_flags, self.isas = OBJECTS, "", ",".join(ISA["ISAS"])

    def finalize_options(self):
        super().finalize_options()
        self.objects, self.last_flags = Path(self.objects), shlex.split(self.last_flags)

    def build_extension(self, extension):
        if (platform := sysconfig.get_platform()) != "linux-x86_64":
            raise CompileError(f"ktmoe needs Linux on x86-64, and this Python is for {platform}")
        check = subprocess.run(["sh", "tools/check_machine.sh", sys.executable], capture_output=True, text=True)
        if check.returncode or check.stdout:
            raise CompileError((check.stdout or check.stderr).strip())
        known = [name for name in ISA["ISAS"] if name in self.isas.split(",") and self.compiler_accepts(name)]
        python = tuple(f"-I{folder}" for folder in self.include_dirs)
        # The Cython module checks arguments and waits for locks: -O3 gains nothing.
        jobs = [(Path(extension.sources[0]), PYTHON, ("-O2", *python))]
        for name in known:
            for source in ISA["sources"](name):
                flags = ISA["compile_flags"](name) + ISA["definitions"](name, source)
                jobs.append((NATIVE / f"kernels/{source}.c", name, flags))
        jobs += [(source, "driver", ()) for room in ISA["DRIVER"] for source in sorted((NATIVE / room).glob("*.c"))]
        tables = " ".join(f"X({name})" for name in known)
        jobs.append((NATIVE / "kernels/isas.c", "driver", (f"-DKT_ISAS={tables}",)))
        jobs.sort(key=lambda job: -work(job[0]))  # so that all processors end together
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(lambda job: self.compiled(*job), jobs))
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # The module has no symbols unless CFLAGS ask for debug information: only debuggers and profilers read them.
        symbols = () if any(flag.startswith("-g") for flag in [*OWN_CFLAGS, *self.last_flags]) else ("-Wl,-s",)
        self.compiler.link_shared_object(objects, str(target), extra_postargs=["-pthread", *symbols, *self.last_flags])

    def compiled(self, source, folder, flags):
        """The object of a source, compiled now if need be. folder: below those of all objects."""
        target = self.objects / folder / source.parent.name / f"{source.stem}.o"
        digest, needs = target.with_suffix(".sha256"), target.with_suffix(".d")
        of_python = self.compiler.compiler_so
        if folder != PYTHON:
            of_python = [*itertools.takewhile(lambda word: not word.startswith("-"), of_python), *WITHOUT_PYTHON]
        # Python's own flags have -g. Debug information took more than half of the build's time, so -g0 takes it back. CFLAGS
        # come again behind it, so that they can ask for it.
        command = [*of_python, "-g0", *OWN_CFLAGS, f"-I{NATIVE}", *ISA["C_FLAGS"], "-Wall", "-Wextra"]
        command += [*flags, *self.last_flags]
        command += ["-MMD", "-MF", str(needs), "-c", str(source), "-o", str(target)]
        if self.force or not target.exists() or not digest.exists() or digest.read_text() != made_of(command, needs):
            digest.unlink(missing_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            print(shlex.join(command))
            begun = time.time_ns()
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            print(done.stderr, end="", file=sys.stderr)
            done.check_returncode()
            target.with_suffix(".json").write_text(json.dumps({"command": command, "warnings": done.stderr}))
            if all(file.stat().st_mtime_ns <= begun for file in inputs(needs)):  # else it was edited meanwhile
                digest.write_text(made_of(command, needs))
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


def work(source):
    """An estimate of a source's compile time, to sort by: its bytes, and 100 000 for each function pair of a loop nest."""
    text = source.read_text()
    for name in re.findall(r'#include "(kernels/common/\w+_ways\.h)"', text):
        text += (NATIVE / name).read_text()
    return len(text) + 100_000 * text.count("\nFUNCTIONS(")


def inputs(needs):
    """The files that the compiler's list names: a source and the headers that it includes, those of the system left out."""
    return [Path(name) for name in needs.read_text().replace("\\\n", " ").partition(": ")[2].split()]


def made_of(command, needs):
    """A digest of all that an object is made of: the compiler, the command, the bytes of the inputs. None if one is missing."""
    try:
        content = [file.read_bytes() for file in inputs(needs)]
    except OSError:
        return None
    words = "\0".join([*command, compiler_version(command[0])]).encode()
    return hashlib.sha256(b"\0".join([words, *content])).hexdigest()


@functools.cache
def compiler_version(compiler):
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


core = Extension("ktmoe._native.core", [str(NATIVE / "python/core.pyx")])
core.depends = [str(path) for pattern in ("*.[ch]", "*.p[xy][dix]") for path in sorted(NATIVE.rglob(pattern))]
core.depends.append("tools/check_machine.sh")  # an sdist has what depends names
setup(ext_modules=cythonize([core], build_dir="build/cython"), cmdclass={"build_ext": BuildNative})
