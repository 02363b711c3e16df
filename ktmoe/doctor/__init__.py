"""What is wrong with this machine's setting for ktmoe, and what to type: the checks of `ktmoe doctor`.

A check reads files below one folder, which is / for this system, and environment variables. It changes nothing.
"""

from __future__ import annotations

from pathlib import Path

from ktmoe.doctor import memory, openmp, packages, processor, threads, variables
from ktmoe.doctor.diagnosis import BETTER, GOOD, NOT_KNOWN, STATES, WRONG, Diagnosis, DoctorCheck
from ktmoe.errors import KtmoeError

__all__ = ["BETTER", "CHECKS", "GOOD", "NOT_KNOWN", "STATES", "WRONG", "Diagnosis", "DoctorCheck", "examine"]

#: All checks, in the order in which they run.
CHECKS = (
    *processor.CHECKS,
    *threads.CHECKS,
    *openmp.CHECKS,
    *memory.CHECKS,
    *variables.CHECKS,
    *packages.CHECKS,
)


def examine(root: Path = Path("/")) -> list[tuple[DoctorCheck, Diagnosis]]:
    """What each check finds. root: the folder that stands for /.

    A check whose files have contents that it does not understand finds NOT_KNOWN.
    """
    return [(check, _diagnosis(check, root)) for check in CHECKS]


def _diagnosis(check: DoctorCheck, root: Path) -> Diagnosis:
    try:
        return check.look(root)
    except (KtmoeError, OSError, ValueError, LookupError) as error:
        return Diagnosis(NOT_KNOWN, f"this could not be found out: {error}")
