"""Fixtures that run a test on every backend, whichever way this machine allows, and the summary that says which way it was."""

from __future__ import annotations

import functools
import gc
import os

import emulator
import pytest
import threadpoolctl
import ways

from ktmoe import measuring
from ktmoe._native import core
from ktmoe.backends import native
from ktmoe.machine import environment, numa, threads

pytest_plugins = (
    "cached",
    "checkpoint_files",
    "cpus",
    "design",
    "doctored",
    "emulator.fixtures",
    "fake_cuda.fixtures",
    "kt_wrappers",
    "sft_wrappers",
    "loading_models",
    "repeating",
    "skips",
    "topology",
)

TUNING = core.tune()


@pytest.fixture(scope="session")
def emulator_folder(tmp_path_factory):
    """Where the emulator is, compiled once for all modules; for all processes of pytest-xdist, which share nothing else."""
    folder = tmp_path_factory.mktemp("emulator")
    if "PYTEST_XDIST_WORKER" in os.environ and emulator.unavailable() is None:
        built = emulator.build(tmp_path_factory.getbasetemp().parent / "emulator")
        os.link(built, folder / built.name)
    return folder


@pytest.fixture(scope="module", params=ways.SUBJECTS)
def backend(request, emulator_folder):
    """The name of a backend that can be used, on each of its instruction sets and in each of its activation modes."""
    with ways.chosen(ways.SUBJECTS[request.param], emulator_folder) as name:
        yield name


@pytest.fixture(scope="module", params=ways.WAYS)
def table(request, emulator_folder):
    """The kernel table of an instruction set that can be used."""
    with ways.prepared(request.param, emulator_folder):
        yield native.load_table(request.param)


@pytest.fixture(scope="session", autouse=True)
def one_blas_thread():
    """numpy's products here are small: its threads would only wait for each other, for long where the machine is busy."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What a module's tests collect is not gone through with all that pytest keeps of the modules before it."""
    gc.collect()
    gc.freeze()


@functools.cache
def default_pool():
    """What threads.configure() tells the pool by default: the system is asked once, and not before each test."""
    return threads.default_num_threads(), False, environment.spin_us(), numa.UNBOUND.domains


@pytest.fixture(autouse=True)
def defaults(monkeypatch):
    """No KTMOE_ variable from outside, and threads and tuning as they are by default, before and after."""
    for name in [name for name in os.environ if name.startswith("KTMOE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(threads, "_chosen", None)
    core.configure_pool(*default_pool())
    core.tune(**TUNING)
    yield
    core.tune(**TUNING)


@pytest.fixture
def limits_at_once(monkeypatch):
    """The machine's limits are not waited for: a second for each layer, where a test is not about them."""
    monkeypatch.setattr("ktmoe.measuring.meter.LEAST_SECONDS", 1e-4)
    monkeypatch.setattr(measuring, "settled", measuring.LimitMeter)


def _emulated(item) -> bool:
    if item.path.name.startswith(("test_amx", "test_emulator")):
        return True
    params = item.callspec.params if hasattr(item, "callspec") else {}
    subject = ways.SUBJECTS.get(params.get("backend"))
    return "emulated" in (ways.WAYS.get(subject.isa if subject else None), ways.WAYS.get(params.get("table")))


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    yield  # what design.py chooses is the same in both runs
    if emulator.forced():
        others = [item for item in items if not _emulated(item)]
        items[:] = [item for item in items if _emulated(item)]
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()  # collecting makes objects by the ten thousand, and garbage hardly any
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()  # many tests collect garbage, which need not go through all of pytest's own objects each time


def pytest_sessionfinish(session, exitstatus):
    if emulator.forced() and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # -k chose none of these


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("ktmoe backends")
    for name, subject in ways.SUBJECTS.items():
        terminalreporter.write_line(f"{name}: {ways.WAYS[subject.isa]}")
