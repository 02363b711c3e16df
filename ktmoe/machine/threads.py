"""How many threads: physical cores within the affinity mask and the cgroup's quota, or what the user says."""

from __future__ import annotations

import math
import operator
import threading
import warnings
from pathlib import Path
from typing import Any

import threadpoolctl

from ktmoe._native import core
from ktmoe.errors import InputError
from ktmoe.machine import cgroup, environment, numa, topology
from ktmoe.machine.cpu import cpuinfo
from ktmoe.messages import show
from ktmoe.version import installed_version

_chosen: int | None = None  # by set_num_threads


def cpu_name() -> str:
    """The CPU's name as /proc/cpuinfo has it."""
    return cpuinfo("model name") or "unknown"


def cgroup_quota(root: Path | None = None) -> float:
    """CPUs' worth of time that the cgroups grant, infinity where none sets a limit (version 2 cpu.max, 1 cfs_quota_us).

    root: the folder that stands for /; None for this system's own.
    """
    quotas = {2: ("cpu.max",), 1: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
    groups = cgroup.folders("cpu", root)
    return min((_ratio(*(folder / file for file in quotas[version])) for version, folder in groups), default=math.inf)


def _ratio(*files: Path) -> float:
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def threads_of(placement: numa.Placement) -> int:
    """Physical cores among the usable CPUs of a placement's nodes, at most the cgroup's quota, at least 1."""
    cpus = set().union(*placement.cpus) if placement.nodes else numa.usable_cpus()
    return max(1, math.floor(min(len(topology.cores(cpus)), cgroup_quota())))


def default_num_threads() -> int:
    """threads_of() the placement that layers have by default."""
    return threads_of(numa.place())


def explain_default() -> str:
    """Where the number of threads comes from, for show_config()."""
    cpus = numa.usable_cpus()
    if _asked_for():
        source = "KTMOE_NUM_THREADS" if _chosen is None else "set by ktmoe.set_num_threads or threadpoolctl"
        more = get_num_threads() > len(cpus)
        return f"{source}, more than the {len(cpus)} CPUs that this process may use" if more else source
    quota = cgroup_quota()
    limit = "no cgroup quota" if quota == math.inf else f"cgroup quota {quota:g}"
    return f"{len(topology.cores(cpus))} physical cores within {len(cpus)} usable CPUs, {limit}"


def _asked_for() -> bool:
    return _chosen is not None or environment.num_threads() is not None


def get_num_threads() -> int:
    """Threads that a forward call uses, the caller's included.

    Examples:
        >>> ktmoe.get_num_threads() >= 1
        True
    """
    return _number(_chosen)


def _number(chosen: int | None) -> int:
    return chosen or environment.num_threads() or default_num_threads()


def set_num_threads(n: int) -> None:
    """Use n threads from the next forward call on, in every layer. The results do not depend on it, bit for bit.

    More threads than this process may use CPUs are slow: RuntimeWarning, once for each number.

    Examples:
        >>> ktmoe.set_num_threads(1)
        >>> ktmoe.get_num_threads()
        1
    """
    global _chosen
    try:
        threads = operator.index(n)
    except TypeError:
        threads = 0
    if not 1 <= threads <= 4096:
        raise InputError(f"the number of threads must be a whole number from 1 to 4096, found {show(n)}")
    _chosen = threads
    configure()


def configure() -> None:
    """Tell the native pool; it starts threads only when there is work. Warns of more threads than CPUs."""
    while True:
        chosen = _chosen
        number, asked_for = _number(chosen), chosen is not None or environment.num_threads() is not None
        if asked_for and number > len(numa.usable_cpus()):
            # of this very line, so that Python shows it once for each text
            warnings.warn(f"{number} threads make calls slow here: {explain_default()}", RuntimeWarning, stacklevel=1)
        core.configure_pool(number, asked_for, environment.spin_us(), numa.UNBOUND.domains)
        if chosen == _chosen:  # else another thread has chosen since, and the pool may have been told that before this
            break
    core.tune(scratch_bytes=environment.scratch_bytes())


class ThreadpoolController(threadpoolctl.LibController):
    """Lets threadpoolctl's threadpool_info() see and threadpool_limits() limit the pool."""

    user_api = "ktmoe"
    internal_api = "ktmoe"
    filename_prefixes = ("core.",)
    check_symbols = ("ktmoe_threadpool",)

    def get_num_threads(self) -> Any:
        return get_num_threads()

    def set_num_threads(self, num_threads: Any) -> None:
        set_num_threads(num_threads)

    def get_version(self) -> Any:
        return installed_version()


def register_with_threadpoolctl() -> None:
    """Tell threadpoolctl of the pool, once, when the first layer is made: importing ktmoe changes nothing."""
    if _registered.acquire(blocking=False):
        threadpoolctl.register(ThreadpoolController)


_registered = threading.Lock()  # taken by the first thread, and never given back
