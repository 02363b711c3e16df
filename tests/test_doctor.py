"""The checks of `ktmoe doctor`, on machines that are folders: each fault is found by its check alone, and its remedy named."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from types import ModuleType

import pytest
import threadpoolctl
from doctored import FILES, VARIABLES, make

from ktmoe import backends, doctor
from ktmoe.doctor import BETTER, GOOD, NOT_KNOWN, WRONG, openmp
from ktmoe.machine import threads

HUGE = "sys/kernel/mm/transparent_hugepage"
MINE = "sys/fs/cgroup/mine"
GOVERNOR = "sys/devices/system/cpu/cpu3/cpufreq/scaling_governor"
DRIVER = "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"
VIRTUAL = "flags\t\t: fpu avx2 hypervisor\n"
KIB = 1024


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """No variable is set, torch is not installed, and numpy's pool has one thread."""
    for name in [name for name in os.environ if name in VARIABLES or name.startswith("KTMOE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(openmp, "has_torch", lambda: False)
    pool = {"internal_api": "openblas", "version": "1", "num_threads": 1}
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: [pool])


@pytest.fixture
def examine(tmp_path):
    """A function of changed files -> {the check's name: what it found}."""
    made = 0

    def call(changed=None):
        nonlocal made
        made += 1
        return {check.name: found for check, found in doctor.examine(make(tmp_path / str(made), changed))}

    return call


@pytest.fixture
def with_torch(monkeypatch):
    monkeypatch.setattr(openmp, "has_torch", lambda: True)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


def meminfo(**gb):
    return "".join(f"{name}: {round(size * 1e9 / KIB)} kB\n" for name, size in gb.items())


def only(found, name, state):
    """The diagnosis of one check, if all others are good."""
    assert {other: d.state for other, d in found.items() if d.state != GOOD} == {name: state}, found
    return found[name]


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
            {"sys/devices/system/node/has_memory": "0-1\n", "proc/self/status": "Cpus_allowed_list:\t0-7\n"},
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


@pytest.mark.parametrize(
    ("variables", "check", "state", "remedy"),
    [
        ({"OMP_WAIT_POLICY": ""}, "torch's idle threads", BETTER, "export OMP_WAIT_POLICY=passive"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "torch's idle threads", BETTER, "export OMP_WAIT_POLICY=passive"),
        ({"OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": "infinity"}, "torch's idle threads", BETTER, "unset GOMP_SPINCOUNT; export"),
        ({"OMP_WAIT_POLICY": "", "KMP_BLOCKTIME": "200ms"}, "torch's idle threads", BETTER, "unset KMP_BLOCKTIME; export"),
        ({"OMP_PROC_BIND": "true"}, "torch's binding", WRONG, "unset OMP_PROC_BIND"),
        (
            {"GOMP_CPU_AFFINITY": "0-3", "KMP_AFFINITY": "compact"},
            "torch's binding",
            WRONG,
            "unset GOMP_CPU_AFFINITY KMP_AFFINITY",
        ),
        ({"OMP_NUM_THREADS": "9"}, "torch's threads", WRONG, "unset OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "four"}, "torch's threads", WRONG, "unset OMP_NUM_THREADS"),
    ],
)
def test_torch(examine, monkeypatch, with_torch, variables, check, state, remedy):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert remedy in only(examine(), check, state).remedy
    monkeypatch.setattr(openmp, "has_torch", lambda: False)
    assert all(found.state == GOOD for found in examine().values())


@pytest.mark.parametrize(
    "variables",
    [
        {"OMP_WAIT_POLICY": " Passive "},
        {"OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": "10000"},
        {"OMP_WAIT_POLICY": "", "KMP_BLOCKTIME": "0"},
        {"OMP_PROC_BIND": "FALSE", "KMP_AFFINITY": "none"},
        {"OMP_NUM_THREADS": "8,2"},
    ],
)
def test_torch_as_it_should_be(examine, monkeypatch, with_torch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert all(found.state == GOOD for found in examine().values())


def test_whether_torch_is_there(monkeypatch):
    monkeypatch.undo()
    for module, there in ((None, False), (ModuleType("torch"), False)):
        monkeypatch.setitem(sys.modules, "torch", module)
        assert openmp.has_torch() is there


def test_other_pools(examine, monkeypatch):
    pool = {"internal_api": "openblas", "version": "1", "num_threads": 9}
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: [pool])
    assert only(examine(), "other thread pools", BETTER).remedy == "export OPENBLAS_NUM_THREADS=8"
    monkeypatch.setattr(threadpoolctl, "threadpool_info", list)
    only(examine(), "other thread pools", NOT_KNOWN)


@pytest.mark.parametrize(
    ("name", "value", "state", "words"),
    [
        ("KTMOE_SPIN_US", "-1", WRONG, "KTMOE_SPIN_US must be a whole number"),
        ("KTMOE_SCRATCH_MB", "0", WRONG, "KTMOE_SCRATCH_MB must be a whole number"),
        ("KTMOE_API_KEY", "a key", WRONG, "KTMOE_API_KEY must be"),
        ("KTMOE_THREADS", "2", BETTER, "nothing reads KTMOE_THREADS; KTMOE_NUM_THREADS has a meaning"),
        ("KTMOE_SPIN_US", "5", GOOD, "set: KTMOE_SPIN_US"),
    ],
)
def test_variables(examine, monkeypatch, name, value, state, words):
    monkeypatch.setenv(name, value)
    found = examine()["variables of ktmoe"]
    assert found.state == state
    assert words in found.found
    assert "a key" not in found.found


def test_a_key_is_not_shown(examine, monkeypatch):
    monkeypatch.setenv("KTMOE_API_KEY", "secret")
    assert not any("secret" in d.found + d.remedy for d in examine().values())


def test_a_backend_by_the_environment(examine, monkeypatch):
    best, *others = backends.available()
    monkeypatch.setenv("KTMOE_BACKEND", "none")
    found = only(examine(), "backend", WRONG)
    assert "unknown backend 'none'" in found.found
    assert found.remedy == "unset KTMOE_BACKEND"
    monkeypatch.setenv("KTMOE_BACKEND", best)
    assert examine()["backend"].state == GOOD
    if others:
        monkeypatch.setenv("KTMOE_BACKEND", others[-1])
        assert f"asks for {others[-1]}, and {best} runs here, too" in only(examine(), "backend", BETTER).found


def test_a_cpu_that_a_host_hides(examine):
    only(examine({"proc/cpuinfo": "flags\t\t: fpu hypervisor\n"}), "backend", BETTER)


def test_amx_that_linux_does_not_give(examine):
    found = examine({"proc/cpuinfo": "flags\t\t: fpu avx2 amx_tile amx_bf16\n"})["backend"]
    if "amx" in backends.available():
        assert found.state == GOOD
    else:
        assert found.state == BETTER
        assert "the CPU has AMX, but" in found.found
        assert "5.16" in found.remedy


def distribution(folder, name, version, requires=()):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {text}" for text in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_packages(examine, monkeypatch, tmp_path):
    """Of this Python's path: a fake ktmoe needs fake packages."""
    folder = tmp_path / "packages"
    needs = ["kt-old>=2", "kt-absent>=1", "kt-odd>1", "kt-more<6,>=5.2; extra == 'transformers'", "kt-never; extra == 'cli'"]
    distribution(folder, "ktmoe", "0.1.0", [*needs, "kt-tool>=9; extra == 'lint'", "ktmoe[cli]; extra == 'serve'", "???"])
    for name, version in (("kt_old", "1.9"), ("kt_odd", "what"), ("kt_more", "6.0"), ("kt_tool", "1")):
        distribution(folder, name, version)
    monkeypatch.syspath_prepend(str(folder))
    found = only(examine(), "packages", WRONG)
    assert found.remedy == "pip install 'kt-old>=2' 'kt-absent>=1' 'kt-odd>1' 'kt-more<6,>=5.2'"
    assert "kt-old is 1.9, expected >=2" in found.found
    assert "kt-absent is not installed" in found.found
    assert "kt-tool" not in found.found


def test_a_tree_that_is_not_installed(examine, monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    monkeypatch.setattr(metadata, "requires", absent)
    assert "ktmoe is not installed" in only(examine(), "packages", NOT_KNOWN).found


def test_packages_that_fit(examine, monkeypatch, tmp_path):
    folder = tmp_path / "packages"
    distribution(folder, "ktmoe", "0.1.0", ["kt-new>=2", "kt-more<6,>=5.2; extra == 'transformers'"])
    distribution(folder, "kt_new", "2.0.1rc1")
    monkeypatch.syspath_prepend(str(folder))
    assert examine()["packages"] == doctor.Diagnosis(GOOD, "kt-new 2.0.1rc1")
