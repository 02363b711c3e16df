"""Compiles every C file as the build does, warnings being errors, and runs clang-format over it; the objects are thrown away.

What the build compiled from these very bytes is not compiled again: its warnings are kept beside the object. Only what NDEBUG
left out of it has to be looked at.

--fix: let clang-format rewrite the files instead.
"""

import functools
import hashlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "ktmoe" / "_native"
ISA = runpy.run_path(str(NATIVE / "isa.py"))
CC = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
INCLUDES = (NATIVE, ROOT / "examples" / "native_backend", sysconfig.get_path("include"))
STRICT = ("-Wall", "-Wextra", "-Werror", "-fPIC", "-c", *(f"-I{folder}" for folder in INCLUDES))


def jobs(files: list[Path]) -> list[tuple[Path, str, tuple[str, ...]]]:
    """(source, what for, flags) of everything that the build compiles, and of what tests and examples have."""
    found = []
    for source in (path for path in files if path.suffix == ".c"):
        if source.parent == NATIVE / "kernels" and source.stem != "isas":
            rows = [name for name in ISA["ISAS"] if source.stem in ISA["sources"](name)]
            found += [(source, name, ISA["compile_flags"](name) + ISA["definitions"](name, source.stem)) for name in rows]
        elif source.parent == ROOT / "tests" / "emulator":
            found.append((source, "", ("-std=gnu11",)))  # it handles signals, beyond C11
        else:
            found.append((source, "", ("-DKT_ISAS=X(portable)",)))
    return found


def accepts(flags: tuple[str, ...]) -> bool:
    """Whether this compiler knows the flags; a build without them is allowed, see setup.py."""
    probe = subprocess.run([*CC, *flags, "-Werror", "-E", "-xc", "-", "-o", os.devnull], input=b"", capture_output=True)
    return probe.returncode == 0


@functools.cache
def version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def build_said(source: Path, row: str, flags: tuple[str, ...]) -> str | None:
    """The compiler's words while the build made the object of this source; None if that is of other bytes, flags or compiler.

    The digest is setup.py's.
    """
    made = ROOT / "build" / "native" / (row or "driver") / source.parent.name / source.stem
    try:
        record = json.loads(made.with_suffix(".json").read_text())
        inputs = made.with_suffix(".d").read_text().replace("\\\n", " ").partition(": ")[2].split()
        content = [(ROOT / name).read_bytes() for name in inputs]
        digest = made.with_suffix(".sha256").read_text()
    except OSError:
        return None
    words = "\0".join([*record["command"], version(record["command"][0])]).encode()
    same_bytes = hashlib.sha256(b"\0".join([words, *content])).hexdigest() == digest
    same_flags = {*ISA["C_FLAGS"], *(flags if row else ())} <= {*record["command"]}
    return record["warnings"] if same_bytes and same_flags and str(source.relative_to(ROOT)) in inputs else None


def compiles(source: Path, row: str, flags: tuple[str, ...], folder: str) -> bool:
    """Whether a file compiles without a warning; prints the compiler's words if not."""
    name = f"{source.relative_to(ROOT)} {row}".rstrip()
    if not accepts(flags):
        print(f"{name}: not compiled, since this compiler does not know {' '.join(flags)}")
        return True
    target = Path(folder, re.sub(r"[/ ]", "_", name) + ".o")
    said = build_said(source, row, flags)
    how = ["-o", str(target)] if said is None else ["-fsyntax-only"]
    done = subprocess.run([*CC, *ISA["C_FLAGS"], *STRICT, *flags, str(source), *how], capture_output=True, text=True)
    print(said or "", done.stderr, sep="", end="")
    return done.returncode == 0 and not said


def main() -> int:
    folders = (NATIVE, ROOT / "tests", ROOT / "examples")
    files = sorted(path for folder in folders for path in folder.rglob("*.[ch]"))
    arguments = ["-i"] if "--fix" in sys.argv else ["--dry-run", "--Werror"]
    clang_format = Path(sysconfig.get_path("scripts"), "clang-format")
    good = subprocess.run([clang_format, *arguments, *files]).returncode == 0
    if "--fix" in sys.argv:
        return not good
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        good &= all(list(pool.map(lambda job: compiles(*job, folder), jobs(files))))
    return not good


if __name__ == "__main__":
    sys.exit(main())
