"""What C files include: no circles, and each room of ktmoe/_native only itself, the rooms below it, and ktmoe.h."""

import graphlib
import re
from pathlib import Path

from ktmoe._native import isa

NATIVE = Path(isa.__file__).parent
#: The rooms of C files, from below.
ROOMS = ("ktmoe.h", *isa.DRIVER)
FILES = {str(file.relative_to(NATIVE)): file for pattern in ("*.h", "*.c") for file in NATIVE.rglob(pattern)}
INCLUDES = {name: set(re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE)) for name, file in FILES.items()}


def room(name):
    return name.partition("/")[0]


def test_what_is_included_is_there_and_no_circle():
    assert set().union(*INCLUDES.values()) <= set(FILES)
    graphlib.TopologicalSorter(INCLUDES).prepare()  # CycleError names one


def test_rooms_include_only_what_is_below_them():
    for name, included in INCLUDES.items():
        # Kernels know nothing of the driver.
        allowed = ROOMS[: ROOMS.index(room(name)) + 1] if room(name) in ROOMS else ("ktmoe.h", "kernels")
        assert {room(other) for other in included} <= set(allowed), name
