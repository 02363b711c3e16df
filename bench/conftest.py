"""Options, the layers that are measured, and the tables at the end."""

from __future__ import annotations

import pytest

from bench import cases, machine, subjects, summary
from bench.models import models


def pytest_addoption(parser):
    group = parser.getgroup("ktmoe")
    group.addoption("--full", action="store_true", help="every model in every way, every number of rows, however long it takes")
    group.addoption(
        "--load-gb", type=float, default=8.0, metavar="GB", help="size of the model that is loaded whole (%(default)s)"
    )
    group.addoption("--models", default="", metavar="NAMES", help=f"only these, comma-separated: {', '.join(models())}")


def pytest_configure(config):
    if unknown := [name for name in _names(config) if name not in models()]:
        raise pytest.UsageError(f"--models: expected names of {', '.join(models())}; found {', '.join(unknown)}")


def _names(config) -> list[str]:
    return [name.strip() for name in config.getoption("--models").split(",") if name.strip()]


def pytest_generate_tests(metafunc):
    if "subject" in metafunc.fixturenames:
        chosen = [models()[name] for name in _names(metafunc.config) or models()]
        found = list(cases.layer_cases(chosen, full=metafunc.config.getoption("--full")))
        metafunc.parametrize("subject", found, ids=[case.id for case in found], indirect=True, scope="session")


@pytest.fixture(scope="session")
def subject(request):
    """Layers packed for each case in turn."""
    with subjects.packed(request.param, full=request.config.getoption("--full")) as subject:
        yield subject


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["ktmoe"] = machine.about()


def pytest_terminal_summary(terminalreporter):
    session = getattr(terminalreporter.config, "_benchmarksession", None)
    rows = [benchmark.extra_info for benchmark in session.benchmarks] if session else []
    rows = [row for row in rows if "suite" in row]  # a test that failed recorded nothing
    if rows:
        terminalreporter.write(f"\n{summary.text(rows)}make results writes a saved run into bench/results and the docs.\n")
