"""ktmoe's threads: how many, and the CPUs that they may use."""

from __future__ import annotations

import math
from pathlib import Path

from ktmoe.doctor.diagnosis import BETTER, GOOD, WRONG, Diagnosis, DoctorCheck, unreadable
from ktmoe.errors import InputError
from ktmoe.machine import environment, numa, topology
from ktmoe.machine.number_lists import listed, numbers, ranges
from ktmoe.machine.system_root import under
from ktmoe.machine.threads import cgroup_quota


def usable_cpus(root: Path) -> frozenset[int]:
    """The CPUs of this process's affinity mask, by /proc/self/status; by the system call where that does not say."""
    try:
        for line in under(root, numa.STATUS).read_text().splitlines():
            if line.startswith("Cpus_allowed_list:") and (found := numbers(line.partition(":")[2])):
                return found
    except (OSError, ValueError):
        pass
    return frozenset(numa.usable_cpus())


def number(root: Path) -> Diagnosis:
    """KTMOE_NUM_THREADS beside the CPUs, the cores and the quota."""
    cpus, quota = usable_cpus(root), cgroup_quota(root)
    cores = len(topology.cores(cpus, root))
    best = max(1, math.floor(min(cores, quota)))
    try:
        asked = environment.num_threads()
    except InputError as error:
        return Diagnosis(WRONG, str(error), "unset KTMOE_NUM_THREADS")
    if asked is None:
        return Diagnosis(GOOD, f"ktmoe takes {best} by itself; this process may use {cores} physical cores, {len(cpus)} CPUs")
    asks = f"KTMOE_NUM_THREADS asks for {asked} threads"
    if asked > len(cpus):
        state, found = WRONG, f"{asks}, but this process may use {len(cpus)} CPUs"
    elif asked > quota:
        state, found = WRONG, f"{asks}, but the control group grants the time of {quota:g} CPUs"
    elif asked > cores:
        state, found = BETTER, f"{asks}, but there are {cores} physical cores: two threads share a core"
    elif asked < best:
        state, found = BETTER, f"{asks}, and {best} cores could work"
    else:
        return Diagnosis(GOOD, f"{asks}, one for each core")
    return Diagnosis(state, found, f"unset KTMOE_NUM_THREADS    # then there are {best}")


def affinity(root: Path) -> Diagnosis:
    """The affinity mask beside the CPUs of the machine."""
    online = listed(root / "sys/devices/system/cpu/online")
    if not online:
        return unreadable(root, "sys/devices/system/cpu/online")
    mine = usable_cpus(root)
    cores, all_cores = len(topology.cores(mine, root)), len(topology.cores(online | mine, root))
    found = f"this process may use {cores} of {all_cores} physical cores (CPUs {ranges(mine)})"
    if cores < all_cores:
        remedy = f"taskset --cpu-list {ranges(online)} COMMAND    # in a container: docker run --cpuset-cpus {ranges(online)}"
        return Diagnosis(BETTER, found, remedy)
    return Diagnosis(GOOD, found)


def quota(root: Path) -> Diagnosis:
    """The control groups' quota beside the cores."""
    granted, cores = cgroup_quota(root), len(topology.cores(usable_cpus(root), root))
    if granted == math.inf:
        return Diagnosis(GOOD, "no control group limits the CPUs' time")
    found = f"the control group grants the time of {granted:g} CPUs, and this process may use {cores} physical cores"
    remedy = f"docker run --cpus {cores}    # or systemctl set-property UNIT CPUQuota={100 * cores}%"
    if granted < 1:
        return Diagnosis(WRONG, found, remedy)
    return Diagnosis(BETTER, found, remedy) if granted < cores else Diagnosis(GOOD, found)


CHECKS = (
    DoctorCheck("threads", "More threads than cores wait for each other in every call; fewer leave cores idle.", number),
    DoctorCheck("affinity", "ktmoe uses only the CPUs that this process may use.", affinity),
    DoctorCheck("CPU quota", "Linux stops all threads for the rest of each 0.1 s when the quota is used up.", quota),
)
