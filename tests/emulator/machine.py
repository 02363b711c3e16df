"""What the emulator's tests run code with: the system's assembler, and signal frames made up for the emulator alone."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import emulator

from .assembly import REGISTERS

DEFAULT_MXCSR = 0x1F80
STALE = 0xAA
_MAP_32BIT = 0x40  # not in Python's mmap
_GREGS, _RIP, _FLAGS, _FPREGS = 5, 16, 17, 23  # 64-bit words in ucontext_t; the middle ones count from the first
_SLOTS = [*REGISTERS[8:], "rdi", "rsi", "rbp", "rbx", "rdx", "rax", "rcx", "rsp"]  # of the general registers, from the first


def aligned(count, dtype):
    """Zeros at a multiple of 64."""
    raw = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + raw.size - 64].view(dtype)


def low_memory():
    """A page that absolute addresses of 32 bits reach."""
    low = np.frombuffer(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_32BIT), np.uint8)
    assert low.ctypes.data + low.size < 1 << 31
    return low


class NotAssembledError(Exception):
    """The assembler's words."""


def assemble(folder, name, text) -> Path:
    """The shared library of that source file."""
    source, output = Path(folder, f"{name}.s"), Path(folder, f"{name}.so")
    source.write_text(text)
    command = [*emulator.compiler(), "-shared", "-o", str(output), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotAssembledError(done.stderr)
    return output


class Frame:
    """A ucontext_t and its XSAVE area, all of whose components are initial but hold stale bytes; as on a CPU without AMX."""

    def __init__(self, address, registers=None, flags=0):
        self.xsave = aligned(1 << 14, np.uint8)
        self.xsave[:] = STALE
        magic_size_features_size = (0x46505853, self.xsave.size, 0xE7, 0, self.xsave.size - 4)
        self.xsave[464:512].view(np.uint32)[:5] = magic_size_features_size
        self.xsave[512:576] = 0
        self.context = aligned(64, np.uint64)
        self.context[_GREGS + _RIP] = address
        self.context[_GREGS + _FLAGS] = flags
        self.context[_GREGS + _FPREGS] = self.xsave.ctypes.data
        for name, value in (registers or {}).items():
            self.context[_GREGS + _SLOTS.index(name)] = value % (1 << 64)

    @classmethod
    def of(cls, code: bytes, registers=None, flags=0):
        """A machine that stands at these bytes of code."""
        machine_code = np.frombuffer(bytearray(code + bytes(15)), np.uint8)
        frame = cls(machine_code.ctypes.data, registers, flags)
        frame.machine_code = machine_code
        return frame

    @property
    def rip(self) -> int:
        """The address of what comes next."""
        return int(self.context[_GREGS + _RIP])

    @rip.setter
    def rip(self, address):
        self.context[_GREGS + _RIP] = address

    @property
    def flags(self) -> int:
        """RFLAGS."""
        return int(self.context[_GREGS + _FLAGS])

    def register(self, name) -> int:
        """A general register."""
        return int(self.context[_GREGS + _SLOTS.index(name)])

    def emulate(self) -> bool:
        """Emulate as far as it goes; whether there was anything to emulate."""
        return emulator.library().kt_emulator_emulate(ctypes.c_void_p(self.context.ctypes.data))


_PREAMBLE = """
import ctypes, faulthandler, mmap, os, resource, signal, sys
import numpy as np
import emulator
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
library = ctypes.CDLL(sys.argv[1])
skipped = ctypes.c_int.in_dll(library, "skipped")
state = np.zeros(4096, np.uint8)
def execute(name, target=None):
    target = target or state.ctypes.data
    getattr(library, name)(ctypes.c_void_p(state.ctypes.data), ctypes.c_void_p(target))
def send():
    os.kill(os.getpid(), signal.SIGILL)
class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_uint8 * 128), ("flags", ctypes.c_int), ("_", ctypes.c_void_p)]
def handle_in_c(flags):
    action = Action(handler=ctypes.cast(library.skip_ud2, ctypes.c_void_p).value, flags=flags)
    assert ctypes.CDLL(None).sigaction(signal.SIGILL, ctypes.byref(action), None) == 0
SIGINFO, NODEFER, RESETHAND = 4, 0x40000000, 0x80000000 - (1 << 32)
"""


def in_process(library, folder, script):
    """Run it in a Python process of its own, with that library of routines; INSTALL in it installs the emulator."""
    environment = {**os.environ, "PYTHONPATH": str(Path(emulator.__file__).parents[1])}
    environment.pop("PYTHONFAULTHANDLER", None)
    script = _PREAMBLE + script.replace("INSTALL", f"emulator.install({str(folder)!r})")
    command = [sys.executable, "-c", script, str(library)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
