"""The checks of `ktmoe doctor` on torch, variables, the backend and packages: each finds its fault, and says what to type."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType

import pytest
import threadpoolctl
from doctored import only

from ktmoe import backends, doctor
from ktmoe.doctor import BETTER, GOOD, NOT_KNOWN, WRONG, openmp


@pytest.fixture
def with_torch(examine, monkeypatch):
    monkeypatch.setattr(openmp, "has_torch", lambda: True)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


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
        ({"OMP_NUM_THREADS": "0"}, "torch's threads", WRONG, "unset OMP_NUM_THREADS"),
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
