"""Which of the emulated instructions the CPU has, and whether this process may run them on it."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

#: What the emulator stands in for, as /proc/cpuinfo calls it.
EMULATED = frozenset({"avx512_bf16", "avx512vbmi", "gfni", "avx512_vnni", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8"})

BASE = frozenset({"avx512f", "avx512bw"})  # what it builds on

_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_PERM, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1022, 0x1023, 18

_forced = False


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The flags in /proc/cpuinfo; none where there is no such file."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def right_platform() -> bool:
    """Linux on x86-64: nothing else is emulated or asked for permission."""
    return sys.platform.startswith("linux") and platform.machine() == "x86_64"


def native(*features: str) -> bool:
    """Whether the CPU runs all of these itself in this process; no argument: all that can be emulated.

    AMX counts although the process has yet to ask for it (`permit`), unless emulation is forced.
    """
    wanted = set(features) or set(EMULATED)
    if _forced and any(feature.startswith("amx_") for feature in wanted):
        return False
    return wanted <= cpu_flags()


def permitted() -> bool:
    """Whether this process may use AMX on the CPU. Linux never takes that back."""
    if not right_platform():
        return False
    mask = ctypes.c_uint64()
    failed = ctypes.CDLL(None).syscall(ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(_ARCH_GET_XCOMP_PERM), ctypes.byref(mask))
    return not failed and bool(mask.value >> _XTILEDATA & 1)


def permit() -> bool:
    """Ask to use AMX on the CPU; whether that was granted. RuntimeError after `force`, which it would undo."""
    if _forced:
        raise RuntimeError("emulation of AMX is forced in this process")
    if right_platform():
        ctypes.CDLL(None).syscall(
            ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(_ARCH_REQ_XCOMP_PERM), ctypes.c_long(_XTILEDATA)
        )
    return permitted()


def force() -> None:
    """Emulate AMX from now on, even on a CPU that has it. It then refuses tile data, as long as nobody asks for permission.

    RuntimeError if this process has that permission already.
    """
    global _forced
    if permitted():
        raise RuntimeError("this process may use AMX on the CPU already, so that nothing would trap")
    _forced = True


def forced() -> bool:
    """Whether `force` was called."""
    return _forced
