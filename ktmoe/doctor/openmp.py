"""torch's threads, which are OpenMP's, and the pools of other libraries."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import threadpoolctl

from ktmoe.doctor.diagnosis import BETTER, GOOD, NOT_KNOWN, WRONG, Diagnosis, DoctorCheck
from ktmoe.doctor.threads import usable_cpus

_PASSIVE = "export OMP_WAIT_POLICY=passive"
_NO_TORCH = Diagnosis(GOOD, "torch is not installed")
#: Variables that keep threads to CPUs, and values that do not do so.
_BINDING = {
    "OMP_PROC_BIND": {"", "false"},
    "GOMP_CPU_AFFINITY": {""},
    "KMP_AFFINITY": {"", "none", "disabled"},
}
#: What sets the threads of each of threadpoolctl's libraries.
_NUMBERS = {"openblas": "OPENBLAS_NUM_THREADS", "mkl": "MKL_NUM_THREADS", "blis": "BLIS_NUM_THREADS"}


def has_torch() -> bool:
    """Whether torch is installed. It is not imported."""
    try:
        return importlib.util.find_spec("torch") is not None
    except ValueError:  # a module that is no module, as tests put in its place
        return False


def idle(root: Path) -> Diagnosis:
    """Whether torch's idle threads spin."""
    if not has_torch():
        return _NO_TORCH
    policy = os.environ.get("OMP_WAIT_POLICY", "").strip().lower()
    if policy == "passive":
        return Diagnosis(GOOD, "OMP_WAIT_POLICY is passive: torch's idle threads sleep")
    if policy == "active":
        return Diagnosis(BETTER, "OMP_WAIT_POLICY is active: torch's idle threads spin", _PASSIVE)
    for name, most, unit in (("GOMP_SPINCOUNT", 10_000, "turns"), ("KMP_BLOCKTIME", 1, "ms")):
        text = os.environ.get(name, "").strip().lower().removesuffix("ms")
        if text:
            short = text.isascii() and text.isdecimal() and int(text) <= most
            found = f"{name} is {os.environ[name]}: torch's idle threads spin for {'at most' if short else 'more than'}"
            return Diagnosis(GOOD if short else BETTER, f"{found} {most} {unit}", "" if short else f"unset {name}; {_PASSIVE}")
    found = "OMP_WAIT_POLICY is not set: torch's idle threads spin in your own programs; ktmoe's commands set it themselves"
    return Diagnosis(BETTER, found, _PASSIVE)


def binding(root: Path) -> Diagnosis:
    """Whether OpenMP keeps the first thread, and so ktmoe, to one CPU."""
    if not has_torch():
        return _NO_TORCH
    names = [name for name, free in _BINDING.items() if os.environ.get(name, "").strip().lower() not in free]
    if names:
        found = f"{names[0]} is {os.environ[names[0]]}: an import of torch may then leave one CPU to ktmoe"
        return Diagnosis(WRONG, found, f"unset {' '.join(names)}")
    return Diagnosis(GOOD, "no variable keeps OpenMP's threads to CPUs")


def number(root: Path) -> Diagnosis:
    """OMP_NUM_THREADS beside the CPUs."""
    if not has_torch():
        return _NO_TORCH
    text, cpus = os.environ.get("OMP_NUM_THREADS"), len(usable_cpus(root))
    if text is None:
        return Diagnosis(GOOD, "OMP_NUM_THREADS is not set: torch chooses")
    first = text.partition(",")[0].strip()  # a list has the numbers of nested regions
    if not (first.isascii() and first.isdecimal() and int(first[:9]) > 0):
        return Diagnosis(WRONG, f"OMP_NUM_THREADS is {text!r}, which is no number of threads", "unset OMP_NUM_THREADS")
    found = f"OMP_NUM_THREADS is {first}, this process may use {cpus} CPUs"
    if int(first[:9]) > cpus:
        return Diagnosis(WRONG, found, "unset OMP_NUM_THREADS")
    return Diagnosis(GOOD, found)


def pools(root: Path) -> Diagnosis:
    """The pools of libraries that this process has loaded, which is numpy's BLAS."""
    found, cpus = threadpoolctl.threadpool_info(), len(usable_cpus(root))
    if not found:
        return Diagnosis(NOT_KNOWN, "threadpoolctl knows no library of this process")
    words = ", ".join(f"{pool['internal_api']} {pool['version']} with {pool['num_threads']} threads" for pool in found)
    large = [pool["internal_api"] for pool in found if pool["num_threads"] > cpus]
    if large:
        variables = " ".join(f"{_NUMBERS.get(name, 'OMP_NUM_THREADS')}={cpus}" for name in dict.fromkeys(large))
        return Diagnosis(BETTER, f"{words}; this process may use {cpus} CPUs", f"export {variables}")
    return Diagnosis(GOOD, words)


CHECKS = (
    DoctorCheck("torch's idle threads", "Threads of torch that spin take the CPUs from ktmoe's threads.", idle),
    DoctorCheck("torch's binding", "ktmoe may use the CPUs that the process's first thread may use.", binding),
    DoctorCheck("torch's threads", "More threads than CPUs wait for each other.", number),
    DoctorCheck("other thread pools", "More threads than CPUs wait for each other.", pools),
)
