"""The packages that ktmoe needs: whether their versions are those that it was made for."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion

from ktmoe.doctor.diagnosis import GOOD, NOT_KNOWN, WRONG, Diagnosis, DoctorCheck

#: The extras that a user runs. Their packages need not be there, but have to be of the right version.
EXTRAS = ("", "cli", "transformers", "serve")


def look(root: Path) -> Diagnosis:
    """The packages of this Python, by their metadata; none is imported."""
    try:
        stated = metadata.requires("ktmoe") or []
    except metadata.PackageNotFoundError:
        return Diagnosis(NOT_KNOWN, "ktmoe is not installed, so nothing says which versions it needs")
    found, wrong = [], []
    for text in stated:
        requirement = _requirement(text)
        if requirement is None or not any(_applies(requirement, extra) for extra in EXTRAS):
            continue
        needed = f"{requirement.name}{requirement.specifier}"
        try:
            version = metadata.version(requirement.name)
            if requirement.specifier.contains(version, prereleases=True):
                found.append(f"{requirement.name} {version}")
            else:
                wrong.append((f"{requirement.name} is {version}, expected {requirement.specifier}", needed))
        except metadata.PackageNotFoundError:
            if _applies(requirement, ""):
                wrong.append((f"{requirement.name} is not installed", needed))
        except InvalidVersion:
            wrong.append((f"{requirement.name} has the version {metadata.version(requirement.name)!r}", needed))
    if wrong:
        remedy = " ".join(f"'{needed}'" for _, needed in wrong)
        return Diagnosis(WRONG, "; ".join(words for words, _ in wrong), f"pip install {remedy}")
    return Diagnosis(GOOD, ", ".join(dict.fromkeys(found)))


def _requirement(text: str) -> Requirement | None:
    try:
        found = Requirement(text)
    except InvalidRequirement:
        return None
    return None if found.name == "ktmoe" else found  # an extra that has other extras


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


CHECKS = (DoctorCheck("packages", "Other versions were not tried with ktmoe, and may lack what it calls.", look),)
