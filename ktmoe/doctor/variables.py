"""ktmoe's environment variables: their values, and names that mean nothing."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from ktmoe.doctor.diagnosis import BETTER, GOOD, WRONG, Diagnosis, DoctorCheck
from ktmoe.errors import InputError
from ktmoe.machine import environment

#: What reads each variable, and raises if its value is wrong; None where other checks or an engine's plug-in do.
READERS = {
    "KTMOE_API_KEY": environment.api_key,
    "KTMOE_BACKEND": None,
    "KTMOE_NUM_THREADS": None,
    "KTMOE_SCRATCH_MB": environment.scratch_bytes,
    "KTMOE_SGLANG": None,
    "KTMOE_SPIN_US": environment.spin_us,
    "KTMOE_TRACEBACK": environment.tracebacks,
    "KTMOE_VLLM": None,
    "KTMOE_VLLM_DENSE": None,
}


def look(root: Path) -> Diagnosis:
    """The first variable that is wrong, or else one that nothing reads."""
    for name, read in READERS.items():
        try:
            if read:
                read()
        except InputError as error:
            return Diagnosis(WRONG, str(error), f"unset {name}")
    given = sorted(name for name in os.environ if name.startswith("KTMOE_"))
    for name in given:
        if name not in READERS:
            near = difflib.get_close_matches(name, READERS, 1)
            meant = f"; {near[0]} has a meaning" if near else ""
            return Diagnosis(BETTER, f"nothing reads {name}{meant}", f"unset {name}")
    return Diagnosis(GOOD, f"set: {', '.join(given)}" if given else "none is set")


CHECKS = (DoctorCheck("variables of ktmoe", "A wrong value is an error, and a wrong name has no effect.", look),)
