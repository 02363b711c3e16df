"""What the extension that kt-kernel chose for this CPU has, and this CPU can run."""

import pytest
from original import Original

from ktmoe._native import core

#: CPU features that a class checks for itself when a layer is made: the extension has it on CPUs without them, too.
REQUIRES = {
    "AVXVNNI256GPTQInt4Packed_MOE": "avx_vnni",
    "AVXVNNI256GPTQInt4_MOE": "avx_vnni",
    "AVXVNNI256RawInt4_MOE": "avx_vnni",
}


@pytest.fixture(scope="module")
def exists(tmp_path_factory):
    """The names of kt-kernel's classes that run on this CPU; a class that is not among them is not compared."""
    original = Original()
    original.classes(out="classes")
    names = original.run(tmp_path_factory.mktemp("classes"))["classes"].tolist()
    present = core.cpu_features()
    return {name for name in names if name not in REQUIRES or present[REQUIRES[name]]}
