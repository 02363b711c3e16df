"""The CPU: the backend that it runs, its clock, and who else uses it."""

from __future__ import annotations

from pathlib import Path

from ktmoe.config import backend_choice
from ktmoe.doctor.diagnosis import BETTER, GOOD, NOT_KNOWN, WRONG, Diagnosis, DoctorCheck, first_line, unreadable
from ktmoe.doctor.threads import usable_cpus
from ktmoe.machine import environment
from ktmoe.machine.cpu import cpuinfo

#: Drivers under which "powersave" raises the clock as soon as there is work.
_RAISE_ANYWAY = {"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"}
#: Governors that keep the clock low, or raise it slowly.
_SLOW = {"powersave", "conservative", "userspace"}
#: The share of the CPUs' time that a host may give to others before it matters.
_MOST_STOLEN = 0.02


def backend(root: Path) -> Diagnosis:
    """The chosen backend, and what a better one would need."""
    found = backend_choice()
    chosen, rows = found["chosen"], found["backends"]
    if chosen is None:
        return Diagnosis(WRONG, f"no backend can be chosen: {found['chosen_why']}", "unset KTMOE_BACKEND")
    best = next(name for name, row in rows.items() if row["available"])
    if chosen != best and environment.backend_override():
        return Diagnosis(BETTER, f"KTMOE_BACKEND asks for {chosen}, and {best} runs here, too", "unset KTMOE_BACKEND")
    flags = _flags(root)
    if "amx_tile" in flags and not rows["amx"]["available"]:
        return Diagnosis(
            BETTER,
            f"the CPU has AMX, but the backend amx cannot run: {rows['amx']['why_not']}",
            "uname -r    # Linux must be 5.16 or newer; a container's seccomp profile must allow arch_prctl",
        )
    if "hypervisor" in flags and "avx2" not in flags:
        remedy = "start the virtual machine with the host's CPU: qemu -cpu host, or host-passthrough in libvirt"
        return Diagnosis(BETTER, f"the backend is {chosen}: this virtual machine shows a CPU without AVX2", remedy)
    isa = f", with kernels of {rows[chosen]['isa']}" if rows[chosen]["isa"] else ""
    better = [f"{name} cannot run: {row['why_not']}" for name, row in rows.items() if not row["available"]]
    return Diagnosis(GOOD, "; ".join([f"the backend is {chosen}{isa}, the best that this CPU runs", *better]))


def clock(root: Path) -> Diagnosis:
    """The governor of the CPUs' clock."""
    folders = sorted(root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq"))
    if not folders:
        return Diagnosis(GOOD, "Linux does not control the clock here, as in most virtual machines")
    governors = {(folder / "scaling_governor").read_text().strip() for folder in folders}
    driver = first_line(folders[0], "scaling_driver")
    slow = governors & _SLOW - ({"powersave"} if driver in _RAISE_ANYWAY else set())
    found = f"the governor is {', '.join(sorted(governors))}" + (f", the driver {driver}" if driver else "")
    if slow:
        return Diagnosis(BETTER, found, "sudo cpupower frequency-set --governor performance")
    return Diagnosis(GOOD, found)


def virtual_machine(root: Path) -> Diagnosis:
    """The time that other virtual machines took, since the start."""
    flags = _flags(root)
    if not flags:
        return unreadable(root, "proc/cpuinfo")
    if "hypervisor" not in flags:
        return Diagnosis(GOOD, "this is no virtual machine")
    fields = (first_line(root, "proc/stat") or "").split()
    if fields[:1] != ["cpu"] or len(fields) < 9:
        return unreadable(root, "proc/stat")
    times = [int(field) for field in fields[1:9]]  # user, nice, system, idle, iowait, irq, softirq, steal
    stolen = times[7] / max(1, sum(times))
    found = f"this is a virtual machine; since its start its host gave {stolen:.1%} of its CPUs' time to others"
    if stolen > _MOST_STOLEN:
        return Diagnosis(BETTER, found, "top    # see st; ask for CPUs of your own")
    return Diagnosis(GOOD, found)


def load(root: Path) -> Diagnosis:
    """The load average of the last minute."""
    fields = (first_line(root, "proc/loadavg") or "").split()
    if not fields:
        return unreadable(root, "proc/loadavg")
    average, cpus = float(fields[0]), len(usable_cpus(root))
    if not 0 <= average < float("inf"):
        return Diagnosis(NOT_KNOWN, f"{root / 'proc/loadavg'} says {fields[0]}")
    found = f"the load average of the last minute is {average:.2f}, this process may use {cpus} CPUs"
    if average > cpus:
        return Diagnosis(BETTER, found, "top    # which programs run")
    return Diagnosis(GOOD, found)


def _flags(root: Path) -> list[str]:
    """The features of the first CPU, by Linux's names; none where Linux does not say."""
    try:
        return (cpuinfo("flags", root) or "").split()
    except OSError:
        return []


CHECKS = (
    DoctorCheck("backend", "A better instruction set multiplies more numbers at a time.", backend),
    DoctorCheck("clock", "A low clock makes every call slower.", clock),
    DoctorCheck("virtual machine", "Calls wait while the host gives the CPUs to others.", virtual_machine),
    DoctorCheck("load", "A call ends when its last thread does, so one busy CPU slows all threads.", load),
)
