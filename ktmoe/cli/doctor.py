"""`ktmoe doctor`: what is wrong with this machine's setting for ktmoe, and what to type."""

from __future__ import annotations

from collections import Counter

import click

from ktmoe import doctor
from ktmoe.cli import options, output, units
from ktmoe.doctor import BETTER, GOOD, WRONG, Diagnosis, DoctorCheck
from ktmoe.loaders.naming import listed
from ktmoe.machine import threads
from ktmoe.measuring.inspection import Inspection, inspect
from ktmoe.messages import printable

HELP = """What is wrong with this machine's setting, and what to type.

It looks at the CPU, threads, torch's settings, memory, environment variables and package versions. It changes nothing and
measures nothing. With DIR it also says whether that checkpoint's experts fit; no weight is read. Exit code 1: something is
wrong.
"""

_MODEL = "A checkpoint that no loader reads, or that does not fit into memory, is refused."


@click.command("doctor", help=HELP)
@click.argument("model", metavar="[DIR]", required=False, type=options.PathType())
@options.JSON
def command(model: str | None, as_json: bool) -> int:
    found = doctor.examine()
    if model is not None:
        diagnosis = of_model(inspect(model))
        found.append((DoctorCheck("model", _MODEL, lambda _: diagnosis), diagnosis))
    if as_json:
        output.print_json(_data(found))
    else:
        output.print_lines(_lines(found))
    return 1 if any(diagnosis.state == WRONG for _, diagnosis in found) else 0


def of_model(found: Inspection) -> Diagnosis:
    """Whether a checkpoint's experts are served and fit, as `ktmoe inspect` says."""
    remedy = f"ktmoe inspect {found.path}"
    if not found.groups:
        reason = found.why_no_loader or "; ".join(refused.reason for refused in found.refused)
        return Diagnosis(WRONG, f"{found.path}: no layer is served: {reason or 'it has no routed experts'}", remedy)
    words = f"{found.path}: loading needs {units.gb(found.needed)}"
    if found.available is not None:
        words += f", {units.gb(max(0, found.available))} is available"
    if found.fits is False:
        return Diagnosis(WRONG, words, f"{remedy}    # free memory, or choose fewer bits")
    without = [layer for group in found.groups if group.choice is None for layer in group.layers]
    left_out = [layer for refused in found.refused for layer in refused.layers] + without
    if left_out:
        return Diagnosis(BETTER, f"{words}; not served: {listed(left_out)}", remedy)
    return Diagnosis(GOOD, words)


def _lines(found: list[tuple[DoctorCheck, Diagnosis]]) -> list[str]:
    """The worst first. What is good takes one line."""
    lines = [f"this machine: {threads.cpu_name()}"]
    for state in doctor.STATES:
        for check, diagnosis in found:
            if diagnosis.state != state:
                continue
            lines.append(f"{state}: {check.name}: {printable(diagnosis.found)}")
            if state in (WRONG, BETTER):
                lines.append(f"  why: {check.why}")
            if diagnosis.remedy:
                lines.append(f"  type: {diagnosis.remedy}")
    counts = Counter(diagnosis.state for _, diagnosis in found)
    return [*lines, ", ".join(f"{counts[state]} {state}" for state in doctor.STATES if counts[state])]


def _data(found: list[tuple[DoctorCheck, Diagnosis]]) -> dict:
    return {
        "cpu": threads.cpu_name(),
        "checks": [
            {
                "name": check.name,
                "finding": diagnosis.state,
                "found": printable(diagnosis.found),
                "why": check.why,
                "remedy": diagnosis.remedy or None,
            }
            for check, diagnosis in found
        ],
        "wrong": sum(diagnosis.state == WRONG for _, diagnosis in found),
    }
