"""A machine whose setting is good for ktmoe, as a folder with the files of /proc and /sys that `ktmoe doctor` reads.

It is named in conftest.py as a plugin, for its fixture.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import threadpoolctl

from ktmoe import doctor
from ktmoe.doctor import GOOD, Diagnosis, openmp

GB = 1000**3
FILES = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Made Up 9000\nflags\t\t: fpu avx2 fma\n\n",
    "proc/loadavg": "0.50 0.70 0.90 1/100 1000\n",
    "proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 100 0 100 800 0 0 0 0 0 0\n",
    "proc/meminfo": f"MemTotal: {100 * GB // 1024} kB\nMemAvailable: {50 * GB // 1024} kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
    "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-7\nMems_allowed_list:\t0\n",
    "proc/self/cgroup": "0::/mine\n",
    "proc/sys/kernel/numa_balancing": "1\n",
    "sys/devices/system/cpu/online": "0-7\n",
    "sys/devices/system/node/has_memory": "0\n",
    "sys/fs/cgroup/mine/cpu.max": "max 100000\n",
    "sys/fs/cgroup/mine/memory.max": "max\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/kernel/mm/transparent_hugepage/defrag": "always defer defer+madvise [madvise] never\n",
    **{f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor": "performance\n" for cpu in range(8)},
    **{f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_driver": "acpi-cpufreq\n" for cpu in range(8)},
    # 4 cores of two CPUs each
    **{f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)},
}
#: What a user's environment may have set, and what tests therefore take out.
VARIABLES = (
    *("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
    *("OMP_NUM_THREADS", "KTMOE_NUM_THREADS", "KTMOE_BACKEND"),
)


def make(root: Path, changed: dict[str, str | bytes | None] | None = None) -> Path:
    """Write the machine below a folder. changed: other contents by file; None where there is no such file."""
    for name, text in {**FILES, **(changed or {})}.items():
        if text is not None:
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """A function of changed files, as make() has them -> {the check's name: what it found}.

    No variable is set, torch is not installed, and numpy's pool has one thread.
    """
    for name in [name for name in os.environ if name in VARIABLES or name.startswith("KTMOE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(openmp, "has_torch", lambda: False)
    pool = {"internal_api": "openblas", "version": "1", "num_threads": 1}
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: [pool])
    made = 0

    def call(changed: dict[str, str | bytes | None] | None = None) -> dict[str, Diagnosis]:
        nonlocal made
        made += 1
        return {check.name: found for check, found in doctor.examine(make(tmp_path / str(made), changed))}

    return call


def only(found: dict[str, Diagnosis], name: str, state: str) -> Diagnosis:
    """What one check found, if all others are good."""
    assert {other: d.state for other, d in found.items() if d.state != GOOD} == {name: state}, found
    return found[name]
