"""ktmoe.vllm on several machines: tools/test_machines.py installs vLLM, and runs these tests beside it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.namespaces import Machines, UnavailableError

HERE = Path(__file__).parent
#: Whether vLLM is here, as it is not where `make test` runs. The folder beside this one has its name, but is no package.
PRESENT = find_spec("vllm") is not None and find_spec("vllm").origin is not None
# models, and what a process of vLLM needs, are those of the tests on one machine
sys.path += [str(HERE.parent / "engines"), str(HERE.parent / "vllm")]


class Skipped(pytest.Module):
    """A module of tests that is not imported, since its imports would fail."""

    def collect(self):
        pytest.skip("vLLM is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if PRESENT else Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    """Warnings of torch, transformers and vLLM about each other are not ours; those of ktmoe stay errors."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)


@pytest.fixture(scope="session", autouse=True)
def _available():
    try:
        with Machines(2, "1gbit"):
            pass
    except UnavailableError as error:
        pytest.skip(f"there can be no network namespaces here: {error}")
