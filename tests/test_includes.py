"""What C files include: no circles, and each room of ktmoe/_native only itself, the rooms below it, and ktmoe.h.

What a kernel file begins with.
"""

import graphlib
import re
from pathlib import Path

import pytest

from ktmoe._native import isa
from ktmoe.weights.elements import FAMILIES

NATIVE = Path(isa.__file__).parent
#: The rooms of C files, from below.
ROOMS = ("sanitizer.h", "ktmoe.h", *isa.DRIVER)
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
        allowed = ROOMS[: ROOMS.index(room(name)) + 1] if room(name) in ROOMS else ("sanitizer.h", "ktmoe.h", "kernels")
        assert {room(other) for other in included} <= set(allowed), name


@pytest.mark.parametrize("name", sorted(name for name in FILES if re.match(rf"kernels/({'|'.join(FAMILIES)})_.*\.c", name)))
def test_a_kernel_file_says_what_it_computes_and_where_its_weights_stand(name):
    """The layout in a picture of its own, or by a header that is there."""
    head = FILES[name].read_text().partition("*/")[0]
    assert re.search(r"^ \* DEFINITION  \S", head, re.MULTILINE)
    assert set(re.search(r"^ \* LAYOUT      (\S.*)", head, re.MULTILINE)[1].replace(". ", " ").split()) & set(FILES)
