"""Test-only emulation of AVX512_BF16, AMX and what the kernels use of AVX512_VBMI, GFNI, AVX512_VNNI and AVX-VNNI: the shipped
object code then runs on any CPU with AVX-512F and BW.

Use it as a context manager, and only where the CPU needs it::

    import emulator

    if emulator.needed("avx512_bf16"):
        with emulator.installed():
            ...  # run a kernel
        emulator.counts()  # {"vdpbf16ps": 1234, ...}
        assert not emulator.errors()

What it does and where: emulator.h. Install it after whatever else handles SIGILL (pytest's faulthandler does; so it does).

A CPU that has AMX refuses tile data in a process that did not ask for it, so that the emulator works there, too (`force`).
Only LDTILECFG, STTILECFG and TILERELEASE then run on the CPU, uncounted, and STTILECFG shows a start_row of the emulator's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from .features import BASE, EMULATED, cpu_flags, force, forced, native, permit, permitted, right_platform

__all__ = [
    "EMULATED",
    "build",
    "compiler",
    "counts",
    "decode",
    "errors",
    "force",
    "forced",
    "install",
    "installed",
    "library",
    "native",
    "needed",
    "permit",
    "permitted",
    "reset",
    "traps",
    "unavailable",
    "uninstall",
]

FLAGS = ["-O2", "-shared", "-fPIC", "-std=gnu11", "-Wall", "-Wextra", "-fvisibility=hidden"]
_MAX_INSN_BYTES = 15  # KT_MAX_INSN_BYTES

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_depth = 0  # nested installs


class _Error(ctypes.Structure):
    """struct report in errors.c."""

    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("name", "what", "library", "symbol")),
        *((name, ctypes.c_size_t) for name in ("address", "library_start", "symbol_start")),
        ("values", ctypes.c_int * 3),
        ("times", ctypes.c_uint64),
    )

    def __str__(self) -> str:
        what = self.what.decode()
        text = f"{self.name.decode()} at {self.address:#x}"
        if self.library:
            text += f", {Path(os.fsdecode(self.library)).name}+{self.address - self.library_start:#x}"
        if self.symbol:
            text += f", {self.symbol.decode()}+{self.address - self.symbol_start:#x}"
        text += f": {what % tuple(self.values[: what.count('%')])}"
        return text if self.times == 1 else f"{text} ({self.times} times)"


def compiler() -> list[str]:
    """The C compiler's command, which is the assembler's, too."""
    return shlex.split(os.environ.get("CC") or "cc")


def unavailable() -> str | None:
    """Why emulation is impossible on this machine, in words; None if it is possible."""
    if not right_platform():
        return "the emulator is for Linux on x86-64"
    missing = BASE - cpu_flags()
    if missing:
        return f"this CPU lacks {', '.join(sorted(missing))}, which the emulator builds on"
    if not shutil.which(compiler()[0]):
        return f"there is no C compiler ({compiler()[0]}) to build the emulator with"
    return None


def needed(*features: str) -> bool:
    """Whether the CPU does not run all of these itself, and the emulator can stand in; no argument: all of EMULATED."""
    unknown = set(features) - EMULATED
    if unknown:
        raise ValueError(f"not emulated: {', '.join(sorted(unknown))}")
    return not native(*features) and unavailable() is None


def build(build_dir: str | os.PathLike[str]) -> Path:
    """Compile the emulator into `build_dir`, unless these sources are there compiled already; return the library's path."""
    directory = Path(build_dir)
    here = Path(__file__).parent
    command = [*compiler(), *FLAGS]
    digest = hashlib.sha256(shlex.join(command).encode())
    for source in sorted([*here.glob("*.c"), *here.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    target = directory / f"emulator-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{target.name}.{os.getpid()}"  # renamed when complete: a process may be killed
    sources = [str(source) for source in sorted(here.glob("*.c"))]
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes want it side by side, and one build is enough
        if target.exists():
            return target
        try:
            subprocess.run([*command, "-o", str(partial), *sources], check=True, capture_output=True, text=True)
            partial.replace(target)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"the emulator does not compile:\n{error.stderr}") from error
        finally:
            partial.unlink(missing_ok=True)
    return target


def library(build_dir: str | os.PathLike[str] | None = None) -> ctypes.CDLL:
    """The compiled emulator, loaded on the first call; RuntimeError if emulation is impossible here."""
    global _library
    if _library is None:
        reason = unavailable()
        if reason:
            raise RuntimeError(reason)
        if build_dir is not None:
            loaded = ctypes.CDLL(str(build(build_dir)))
        else:
            with tempfile.TemporaryDirectory(prefix="emulator-") as directory:
                loaded = ctypes.CDLL(str(build(directory)))  # stays mapped when the file is gone
        loaded.kt_emulator_count.argtypes = [ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_bool)]
        loaded.kt_emulator_count.restype = ctypes.c_char_p
        loaded.kt_emulator_traps.restype = ctypes.c_uint64
        loaded.kt_emulator_emulate.argtypes = [ctypes.c_void_p]
        loaded.kt_emulator_emulate.restype = ctypes.c_bool
        loaded.kt_emulator_decode.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int)]
        loaded.kt_emulator_decode.restype = ctypes.c_char_p
        loaded.kt_emulator_error.argtypes = [ctypes.c_size_t, ctypes.POINTER(_Error)]
        loaded.kt_emulator_error.restype = ctypes.c_bool
        loaded.kt_emulator_errors_lost.restype = ctypes.c_size_t
        loaded.kt_emulator_tile_states.restype = ctypes.c_size_t
        _library = loaded
    return _library


def install(build_dir: str | os.PathLike[str] | None = None) -> None:
    """Handle SIGILL from now on, in all threads; calls nest, and each wants its `uninstall`.

    `build_dir` keeps the compiled emulator for the next process; without it, each process compiles its own (about a second).
    RuntimeError if emulation is impossible here, or was forced in vain. What the CPU runs itself never traps.
    """
    global _depth
    if forced() and permitted():
        raise RuntimeError("emulation of AMX is forced, but somebody has asked to use it on the CPU")
    with _lock:
        if _depth == 0:
            code = library(build_dir).kt_emulator_install()
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
            code = library().kt_emulator_uninstall()
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
    emulator = library()
    executed, is_native = ctypes.c_uint64(), ctypes.c_bool()
    result: dict[str, int] = {}
    numbers = itertools.count()
    while name := emulator.kt_emulator_count(next(numbers), executed, is_native):
        if is_native.value == native:
            result[name.decode()] = result.get(name.decode(), 0) + executed.value  # one with several encodings has several rows
    return result


def traps() -> int:
    """SIGILLs handled since the last `reset`; fewer than instructions, as one trap emulates all that follow directly."""
    return library().kt_emulator_traps()


def errors() -> list[str]:
    """What a CPU would have faulted on since the last `reset`, in words, with the instruction's address; should be empty.

    Such an instruction had no effect, and execution went on. A bad address is not among them: that is a SIGSEGV.
    """
    emulator, error = library(), _Error()
    numbers = itertools.count()
    result = []
    while emulator.kt_emulator_error(next(numbers), error):
        result.append(str(error))
    lost = emulator.kt_emulator_errors_lost()
    return [*result, f"and {lost} more"] if lost else result


def reset() -> None:
    """Set all counts to zero and forget the errors."""
    library().kt_emulator_reset()


def decode(code: bytes) -> tuple[str, int] | None:
    """Name and length in bytes of the instruction that `code` starts with; None if it is not one to emulate."""
    length = ctypes.c_int()
    name = library().kt_emulator_decode(code.ljust(_MAX_INSN_BYTES, b"\0"), length)
    return (name.decode(), length.value) if name else None
