"""The checks of `ktmoe doctor` that read files, on machines that are folders: each finds its fault, and says what to type."""

from __future__ import annotations

import pytest
from doctored import FILES, make, only

from ktmoe import doctor
from ktmoe.doctor import BETTER, GOOD, NOT_KNOWN, WRONG
from ktmoe.machine import threads

HUGE = "sys/kernel/mm/transparent_hugepage"
MINE = "sys/fs/cgroup/mine"
GOVERNOR = "sys/devices/system/cpu/cpu3/cpufreq/scaling_governor"
DRIVER = "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"
VIRTUAL = "flags\t\t: fpu avx2 hypervisor\n"
KIB = 1024


def meminfo(**gb):
    return "".join(f"{name}: {round(size * 1e9 / KIB)} kB\n" for name, size in gb.items())


def test_a_good_machine(examine):
    found = examine()
    assert {name: d for name, d in found.items() if d.state != GOOD} == {}
    assert not any(d.remedy for d in found.values())
    assert "ktmoe takes 4 by itself; this process may use 4 physical cores, 8 CPUs" in found["threads"].found
    assert "this process may use 4 of 4 physical cores (CPUs 0-7)" in found["affinity"].found
    assert "50 GB of 100 GB" in found["free memory"].found


def test_every_check_has_a_name_of_its_own_and_a_reason():
    names = [check.name for check in doctor.CHECKS]
    assert len(set(names)) == len(names)
    assert all(check.why.endswith(".") and check.look.__doc__ for check in doctor.CHECKS)


@pytest.mark.parametrize(
    ("changed", "name", "state", "words", "remedy"),
    [
        ({GOVERNOR: "powersave\n"}, "clock", BETTER, "performance, powersave", "cpupower frequency-set --governor performance"),
        ({"proc/loadavg": "8.01 0 0 1/1 1\n"}, "load", BETTER, "8.01, this process may use 8 CPUs", "top"),
        (
            {"proc/cpuinfo": VIRTUAL, "proc/stat": "cpu  100 0 100 700 0 0 0 100 0 0\n"},
            *("virtual machine", BETTER, "10.0% of its CPUs' time", "top"),
        ),
        ({"proc/self/status": "Cpus_allowed_list:\t0-2,5\n"}, "affinity", BETTER, "3 of 4", "taskset --cpu-list 0-7 COMMAND"),
        ({f"{MINE}/cpu.max": "250000 100000\n"}, "CPU quota", BETTER, "the time of 2.5 CPUs", "docker run --cpus 4 "),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, "CPU quota", WRONG, "the time of 0.5 CPUs", "CPUQuota=400%"),
        (
            {"proc/meminfo": meminfo(MemTotal=9, MemAvailable=0.9, SwapTotal=0, SwapFree=0)},
            "free memory",
            WRONG,
            "0.9 GB of 9",
            "top",
        ),
        (
            {f"{MINE}/memory.max": "60000000000\n"},
            "memory limit",
            BETTER,
            "60 GB of the machine's 100 GB",
            "docker run --memory",
        ),
        ({f"{HUGE}/enabled": "always madvise [never]\n"}, "huge pages", BETTER, "no huge pages", f"tee /{HUGE}/enabled"),
        ({f"{HUGE}/defrag": "always madvise [never]\n"}, "huge pages", BETTER, "defrag is never", f"tee /{HUGE}/defrag"),
        (
            {"proc/meminfo": meminfo(MemTotal=100, MemAvailable=50, SwapTotal=20, SwapFree=14)},
            *("swap", BETTER, "6 GB of 20 GB of swap is used", "swapoff -a"),
        ),
        (
            {"sys/devices/system/node/has_memory": "0-1\n"},  # though the cpuset allows the memory of one alone
            *("NUMA balancing", BETTER, "nodes 0-1", "echo 0 | sudo tee /proc/sys/kernel/numa_balancing"),
        ),
    ],
)
def test_a_fault(examine, changed, name, state, words, remedy):
    found = only(examine(changed), name, state)
    assert words in found.found
    assert remedy in found.remedy


@pytest.mark.parametrize(
    "changed",
    [
        {GOVERNOR: "powersave\n", DRIVER: "intel_pstate\n"},
        {GOVERNOR: "schedutil\n"},
        {name: None for name in FILES if "cpufreq" in name},
        {"proc/loadavg": "8.00 0 0 1/1 1\n"},
        {"proc/loadavg": "0.00 0 0 1/1 1\n"},
        {"proc/meminfo": meminfo(MemTotal=9, MemAvailable=1.1, SwapTotal=0, SwapFree=0)},
        {"proc/cpuinfo": VIRTUAL, "proc/stat": "cpu  100 0 100 790 0 0 0 10 0 0\n"},
        {"proc/self/status": "Cpus_allowed_list:\t0-3\n"},  # one CPU of each core
        {f"{MINE}/cpu.max": "400000 100000\n"},
        {f"{MINE}/memory.max": "9223372036854771712\n"},  # what version 1 says where nothing limits
        {"proc/meminfo": meminfo(MemTotal=100, MemAvailable=50, SwapTotal=20, SwapFree=16)},
        {f"{HUGE}/enabled": "[always] madvise never\n", f"{HUGE}/defrag": None},
        {"sys/devices/system/node/has_memory": "0-1\n", "proc/sys/kernel/numa_balancing": "0\n"},
        {"sys/devices/system/node/has_memory": "0-1\n", "proc/sys/kernel/numa_balancing": None},
        {"sys/devices/system/node/has_memory": None},
    ],
)
def test_what_is_no_fault(examine, changed):
    changed = {"proc/self/status": "Cpus_allowed_list:\t0-7\n", **changed}
    assert {name: d for name, d in examine(changed).items() if d.state != GOOD} == {}


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"proc/cpuinfo": None}, {"virtual machine"}),
        ({"proc/cpuinfo": VIRTUAL, "proc/stat": "cpu\n"}, {"virtual machine"}),
        ({"proc/cpuinfo": VIRTUAL, "proc/stat": "cpu  a 0 0 0 0 0 0 0\n"}, {"virtual machine"}),
        ({"proc/loadavg": ""}, {"load"}),
        ({"proc/loadavg": b"\xff\xfe\n"}, {"load"}),
        ({"proc/loadavg": "nan 0 0\n"}, {"load"}),
        ({"proc/loadavg": "busy\n"}, {"load"}),
        ({"proc/self/cgroup": "nonsense\n"}, {"threads", "CPU quota", "free memory", "memory limit"}),
        ({"proc/meminfo": "MemTotal: many kB\n"}, {"free memory", "memory limit", "swap"}),
        ({"proc/meminfo": None}, {"free memory", "memory limit", "swap"}),
        ({"sys/devices/system/cpu/online": "all\n"}, {"affinity"}),
        ({f"{HUGE}/enabled": "always madvise never\n"}, {"huge pages"}),
        ({f"{HUGE}/enabled": None}, {"huge pages"}),
        ({GOVERNOR: b"\xff\n"}, {"clock"}),
        (
            {"sys/devices/system/node/has_memory": "0-1\n", "proc/sys/kernel/numa_balancing": "on\n"},
            {"NUMA balancing"},
        ),
    ],
)
def test_odd_contents(examine, changed, names):
    """They are not known, the check says so, and all other checks go on."""
    changed = {"proc/self/status": "Cpus_allowed_list:\t0-7\n", **changed}
    found = examine(changed)
    assert {name for name, d in found.items() if d.state == NOT_KNOWN} == names
    assert {d.state for name, d in found.items() if name not in names} == {GOOD}


def test_an_empty_folder(tmp_path):
    assert not [d for _, d in doctor.examine(tmp_path) if d.state in (WRONG, BETTER)]


@pytest.mark.parametrize(
    ("value", "quota", "state", "words"),
    [
        ("9", "max 100000", WRONG, "asks for 9 threads, but this process may use 8 CPUs"),
        ("7", "600000 100000", WRONG, "asks for 7 threads, but the control group grants the time of 6 CPUs"),
        ("8", "max 100000", BETTER, "asks for 8 threads, but there are 4 physical cores"),
        ("3", "max 100000", BETTER, "asks for 3 threads, and 4 cores could work"),
        ("0", "max 100000", WRONG, "must be a whole number from 1 to 4096, found '0'"),
        ("4", "max 100000", GOOD, "asks for 4 threads, one for each core"),
    ],
)
def test_threads(examine, monkeypatch, value, quota, state, words):
    monkeypatch.setenv("KTMOE_NUM_THREADS", value)
    found = examine({f"{MINE}/cpu.max": quota + "\n"})["threads"]
    assert found.state == state
    assert words in found.found
    assert found.remedy.startswith("unset KTMOE_NUM_THREADS") == (state != GOOD)


def test_the_quota_of_this_system_is_read_as_before(examine, tmp_path):
    assert threads.cgroup_quota(make(tmp_path / "root", {f"{MINE}/cpu.max": "150000 100000\n"})) == 1.5
    found = examine({f"{MINE}/cpu.max": "150000 100000\n"})
    assert "ktmoe takes 1 by itself" in found["threads"].found
