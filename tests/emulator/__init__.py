"""Test-only emulation of the AVX512_BF16 instructions, so that the shipped object code runs on any CPU with AVX-512F and BW.

Use it as a context manager, and only where the CPU needs it::

    import emulator

    if emulator.needed():
        with emulator.installed():
            ...  # run a kernel
        emulator.counts()  # {"vdpbf16ps": 1234, ...}

What it does and where: emulator.h. Install it after whatever else handles SIGILL (pytest's faulthandler does; so it does).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "build",
    "counts",
    "decode",
    "install",
    "installed",
    "native",
    "needed",
    "reset",
    "traps",
    "unavailable",
    "uninstall",
]

_FLAGS = ["-O2", "-shared", "-fPIC", "-std=gnu11", "-Wall", "-Wextra", "-fvisibility=hidden"]
_MAX_INSN_BYTES = 15  # KT_MAX_INSN_BYTES

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_depth = 0  # nested installs


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("flags"):
                    return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or "cc")


def native() -> bool:
    """Whether this CPU has AVX512_BF16, so that there is nothing to emulate."""
    return "avx512_bf16" in _cpu_flags()


def unavailable() -> str | None:
    """Why emulation is impossible on this machine, in words; None if it is possible."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return "the emulator is for Linux on x86-64"
    missing = {"avx512f", "avx512bw"} - _cpu_flags()
    if missing:
        return f"this CPU lacks {', '.join(sorted(missing))}, which the emulator builds on"
    if not shutil.which(_compiler()[0]):
        return f"there is no C compiler ({_compiler()[0]}) to build the emulator with"
    return None


def needed() -> bool:
    """Whether this CPU lacks AVX512_BF16 and the emulator can stand in for it."""
    return not native() and unavailable() is None


def build(build_dir: str | os.PathLike[str]) -> Path:
    """Compile the emulator into `build_dir`, unless these sources are there compiled already; return the library's path."""
    directory = Path(build_dir)
    here = Path(__file__).parent
    command = [*_compiler(), *_FLAGS]
    digest = hashlib.sha256(shlex.join(command).encode())
    for source in sorted([*here.glob("*.c"), *here.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    library = directory / f"emulator-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{library.name}.{os.getpid()}"  # renamed when complete: test processes may build side by side
    sources = [str(source) for source in sorted(here.glob("*.c"))]
    try:
        subprocess.run([*command, "-o", str(partial), *sources], check=True, capture_output=True, text=True)
        partial.replace(library)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"the emulator does not compile:\n{error.stderr}") from error
    finally:
        partial.unlink(missing_ok=True)
    return library


def _load(build_dir: str | os.PathLike[str] | None) -> ctypes.CDLL:
    global _library
    if _library is None:
        reason = unavailable()
        if reason:
            raise RuntimeError(reason)
        if build_dir is not None:
            library = ctypes.CDLL(str(build(build_dir)))
        else:
            with tempfile.TemporaryDirectory(prefix="emulator-") as directory:
                library = ctypes.CDLL(str(build(directory)))  # stays mapped when the file is gone
        library.kt_emulator_count.argtypes = [ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_bool)]
        library.kt_emulator_count.restype = ctypes.c_char_p
        library.kt_emulator_traps.restype = ctypes.c_uint64
        library.kt_emulator_emulate.argtypes = [ctypes.c_void_p]
        library.kt_emulator_emulate.restype = ctypes.c_bool
        library.kt_emulator_decode.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int)]
        library.kt_emulator_decode.restype = ctypes.c_char_p
        _library = library
    return _library


def install(build_dir: str | os.PathLike[str] | None = None) -> None:
    """Handle SIGILL from now on, in all threads; calls nest, and each wants its `uninstall`.

    `build_dir` keeps the compiled emulator for the next process; without it, each process compiles its own (about a second).
    RuntimeError if emulation is impossible here. On a CPU that has the instructions, nothing ever traps.
    """
    global _depth
    with _lock:
        if _depth == 0:
            code = _load(build_dir).kt_emulator_install()
            if code:
                raise RuntimeError(f"the emulator cannot be installed: {errno.errorcode.get(code, code)}")
        _depth += 1


def uninstall() -> None:
    """Undo one `install`; the last puts the former handler back.

    RuntimeError if none is left to undo, or if another handler was installed on top.
    """
    global _depth
    with _lock:
        if _depth == 0:
            raise RuntimeError("the emulator is not installed")
        if _depth == 1:
            code = _load(None).kt_emulator_uninstall()
            if code == errno.EBUSY:
                raise RuntimeError("another SIGILL handler was installed after the emulator; remove that one first")
            if code:
                raise RuntimeError(f"the emulator cannot be removed: {errno.errorcode.get(code, code)}")
        _depth -= 1


@contextlib.contextmanager
def installed(build_dir: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """`install` on entry, `uninstall` on exit."""
    install(build_dir)
    try:
        yield
    finally:
        uninstall()


def counts(*, native: bool = False) -> dict[str, int]:
    """Instructions emulated since the last `reset`, by name, in all threads; every known name is there.

    native: those instead that the CPU has, but that were emulated as well because they followed directly.
    """
    library = _load(None)
    executed, is_native = ctypes.c_uint64(), ctypes.c_bool()
    result: dict[str, int] = {}
    numbers = itertools.count()
    while name := library.kt_emulator_count(next(numbers), executed, is_native):
        if is_native.value == native:
            result[name.decode()] = executed.value
    return result


def traps() -> int:
    """SIGILLs handled since the last `reset`; fewer than instructions, as one trap emulates all that follow directly."""
    return _load(None).kt_emulator_traps()


def reset() -> None:
    """Set all counts to zero."""
    _load(None).kt_emulator_reset()


def decode(code: bytes) -> tuple[str, int] | None:
    """Name and length in bytes of the instruction that `code` starts with; None if it is not one to emulate."""
    length = ctypes.c_int()
    name = _load(None).kt_emulator_decode(code.ljust(_MAX_INSN_BYTES, b"\0"), length)
    return (name.decode(), length.value) if name else None
