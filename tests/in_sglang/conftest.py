"""ktmoe inside SGLang: tools/test_sglang.py installs upstream's wheel and the fork's, and runs these tests beside each."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest


def installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


#: Which of the two SGLangs is here; neither where `make test` runs.
FORK = installed("sglang-kt")
UPSTREAM = installed("sglang") and not FORK
#: What needs one of them.
OF_ONE = {"test_sglang_processes.py": UPSTREAM, "test_sglang_fork.py": FORK}
#: What needs none.
WITHOUT = {"test_sglang_tool.py"}
if UPSTREAM or FORK:
    # before torch is imported: what SGLang compiles is a line of torch's own, and a compiler takes seconds for it
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


class Skipped(pytest.Module):
    """A module of tests that is not imported, since its imports would fail."""

    def collect(self):
        pytest.skip("SGLang is not installed", allow_module_level=True)


def pytest_ignore_collect(collection_path):
    return True if (UPSTREAM or FORK) and not OF_ONE.get(collection_path.name, True) else None


def pytest_pycollect_makemodule(module_path, parent):
    present = UPSTREAM or FORK or module_path.name in WITHOUT
    return None if present else Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    """Warnings of torch and SGLang about each other are not ours."""
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)


@pytest.fixture(scope="session")
def wheel():
    """SGLang's own modules, imported, with ktmoe as kt_kernel."""
    import sglang_wheel

    with sglang_wheel.imported(FORK) as module:
        yield module


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A --kt-method -> the folder of a small checkpoint that it takes, written once."""
    import sglang_checkpoints
    import sglang_wheel as sizes

    folders = {}

    def folder(method: str) -> Path:
        if method not in folders:
            folders[method] = tmp_path_factory.mktemp(method)
            sglang_checkpoints.WRITERS[method](
                folders[method],
                num_experts=sizes.EXPERTS,
                hidden=sizes.HIDDEN,
                intermediate=sizes.INTERMEDIATE,
                layers=sizes.LAYERS,
                top_k=sizes.TOP_K,
            )
        return folders[method]

    return folder
