"""The C library: compiling it, calling it, and the orders that tests give it."""

from __future__ import annotations

import ctypes
import subprocess
import weakref
from pathlib import Path

from environments import COMPILER

HERE = Path(__file__).parent
FLAGS = ("-std=c11", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
ADD_BF16, NEGATE_BF16, WIDEN_INT32, WIDEN_BF16, NARROW_FLOAT32, FILL, DELAY, GATE = range(8)
NOT_READY = 600


def build(folder: Path, version: int = 12, without: str = "") -> Path:
    """Compile the library with the names of a version of CUDA; without: a function that it lacks."""
    library = folder / f"libfake{version}{without}.so"
    defined = [f"-DFAKE_CUDA={version}", *([f"-DWITHOUT_{without}"] if without else [])]
    subprocess.run([*COMPILER, *FLAGS, *defined, "-o", library, *sorted(HERE.glob("*.c"))], check=True)
    return library


class CudaError(RuntimeError):
    """What torch raises where a call of CUDA fails. number: CUDA's."""

    def __init__(self, number: int, words: str):
        super().__init__(f"CUDA error: {words}")
        self.number = number


class Runtime:
    def __init__(self, path: Path):
        self.path = path
        self._library = ctypes.CDLL(str(path))  # which lets other threads run while it is called
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        for name in ("fakeCalls", "fakeQueued", "fakePinned"):
            getattr(self._library, name).restype = ctypes.c_uint64

    def call(self, name: str, *arguments) -> None:
        """A function of CUDA, or one that works in a stream. Integers are handles and addresses."""
        error = self.error_of(name, *arguments)
        if error:
            raise CudaError(error, self._library.cudaGetErrorString(error).decode())

    def error_of(self, name: str, *arguments) -> int:
        """The same, but for the exception."""
        return getattr(self._library, name)(*(_word(argument) for argument in arguments))

    def made(self, name: str, *arguments) -> int:
        """The handle that a function of CUDA makes; it comes first."""
        out = ctypes.c_void_p()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value

    def done_while_the_gil_is_held(self, stream: int, seconds: int) -> bool:
        """Whether a stream gets to its end while no other thread can run Python."""
        holding = ctypes.PyDLL(str(self.path))
        return bool(holding.fakeWait(_word(stream), ctypes.c_int(1000 * seconds)))

    def over(self, name: str, handle: int) -> bool:
        """What a query says."""
        try:
            self.call(name, handle)
        except CudaError as error:
            if error.number != NOT_READY:
                raise
            return False
        return True

    def capturing(self, stream: int) -> bool:
        status = ctypes.c_int()
        self.call("cudaStreamIsCapturing", stream, ctypes.byref(status))
        return status.value != 0

    def memory(self, size: int, pinned: bool) -> ctypes.Array:
        """Poisoned; it is freed with the last array that is made of it."""
        address = self.made("cudaHostAlloc", max(size, 1), 0) if pinned else self.made("fakeAllocate", max(size, 1))
        memory = (ctypes.c_char * size).from_address(address)
        weakref.finalize(memory, self._library.fakeRelease, ctypes.c_void_p(address)).atexit = False
        return memory

    # Orders and questions

    def fail(self, name: str, error: int, skip: int = 0) -> None:
        """The call after the next `skip` ones of this name returns an error."""
        self._library.fakeFail(name.encode(), error, skip)

    def calls(self, name: str) -> int:
        return self._library.fakeCalls(name.encode())

    def queued(self, stream: int) -> int:
        """Works that were put into a stream, but for those that were captured."""
        return self._library.fakeQueued(_word(stream))

    def pinned(self) -> int:
        """How many pieces of pinned memory there are."""
        return self._library.fakePinned()

    def seed(self, number: int) -> None:
        """Graphs' nodes that may run in any order run in another one."""
        self._library.fakeSeed(ctypes.c_uint64(number))

    def violations(self) -> str:
        """What was done since the last time that CUDA forbids."""
        text = ctypes.create_string_buffer(4096)
        self._library.fakeViolations(text, ctypes.c_size_t(len(text)))
        return text.value.decode()

    def last_error(self) -> int:
        """The last error of this thread, which is forgotten then."""
        return self._library.cudaGetLastError()


def _word(argument):
    """An argument as a pointer or a size, if it is a Python integer."""
    return ctypes.c_void_p(argument) if isinstance(argument, int) else argument
