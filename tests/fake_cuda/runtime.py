"""The C library: compiling it, calling it, and the orders that tests give it."""

from __future__ import annotations

import ctypes
import subprocess
import weakref
from pathlib import Path

from environments import COMPILER

HERE = Path(__file__).parent
FLAGS = ("-std=c11", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")
ADD_BF16, NEGATE_BF16, WIDEN_INT32, WIDEN_BF16, NARROW_FLOAT32, DELAY, GATE = range(7)


def build(folder: Path, version: int = 12, without: str = "") -> Path:
    """Compile the library with the names of a version of CUDA; without: a function that it lacks."""
    library = folder / f"libfake{version}{without}.so"
    defined = [f"-DFAKE_CUDA={version}", *([f"-DWITHOUT_{without}"] if without else [])]
    subprocess.run([*COMPILER, *FLAGS, *defined, "-o", library, *sorted(HERE.glob("*.c"))], check=True)
    return library


class CudaError(RuntimeError):
    """What torch raises where a call of CUDA fails."""


class Runtime:
    def __init__(self, path: Path):
        self.path = path
        self._library = ctypes.CDLL(str(path))  # which lets other threads run while it is called
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library.fakeAllocate.restype = ctypes.c_void_p
        self._library.fakePinned.restype = ctypes.c_uint64

    def call(self, name: str, *arguments) -> None:
        """A function of CUDA, or one that works in a stream. Integers are handles and addresses."""
        if error := self.error_of(name, *arguments):
            raise CudaError(f"CUDA error: {self._library.cudaGetErrorString(error).decode()}")

    def error_of(self, name: str, *arguments) -> int:
        """The same, but for the exception."""
        return getattr(self._library, name)(*(ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments))

    def made(self, name: str, *arguments) -> int:
        """The handle that a function of CUDA makes; it comes first."""
        out = ctypes.c_void_p()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value

    def memory(self, size: int, pinned: bool) -> ctypes.Array:
        """Poisoned; it is freed with the last array that is made of it."""
        address = (
            self.made("cudaHostAlloc", max(size, 1), 0) if pinned else self._library.fakeAllocate(ctypes.c_size_t(max(size, 1)))
        )
        memory = (ctypes.c_char * size).from_address(address)
        weakref.finalize(memory, self._library.fakeRelease, ctypes.c_void_p(address)).atexit = False
        return memory

    # Orders and questions

    def fail(self, name: str, error: int, skip: int = 0) -> None:
        """The call after the next `skip` ones of this name returns an error."""
        self._library.fakeFail(name.encode(), error, skip)

    def pinned(self) -> int:
        """How many pieces of pinned memory there are."""
        return self._library.fakePinned()

    def violations(self) -> str:
        """What was done since the last time that CUDA forbids."""
        text = ctypes.create_string_buffer(4096)
        self._library.fakeViolations(text)
        return text.value.decode()

    def last_error(self) -> int:
        """The last error of this thread, which is forgotten then."""
        return self._library.cudaGetLastError()
