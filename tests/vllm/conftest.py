"""ktmoe.vllm inside vLLM: tools/test_engines.py installs it, and runs these tests beside it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: Whether vLLM is here, as it is not where `make test` runs. This folder has its name, but is no package.
PRESENT = find_spec("vllm") is not None and find_spec("vllm").origin is not None
#: What needs no vLLM.
WITHOUT = {"test_without_vllm.py"}
# the tests of transformers have models that these tests use, too
sys.path.append(str(HERE.parent / "engines"))


class Skipped(pytest.Module):
    """A module of tests that is not imported, since its imports would fail."""

    def collect(self):
        pytest.skip("vLLM is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if PRESENT or module_path.name in WITHOUT else Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    """Warnings of torch, transformers and vLLM about each other are not ours; those of ktmoe stay errors."""
    for item in items:
        if str(item.path).startswith(f"{HERE}/"):
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)


@pytest.fixture
def layers(tmp_path_factory):
    """layers_of_vllm, in a process that vLLM's layers can be made in."""
    import layers_of_vllm  # not before: it warns

    import ktmoe.vllm

    ktmoe.vllm.register()
    with layers_of_vllm.vllm_is_set_up(tmp_path_factory.getbasetemp()):
        yield layers_of_vllm
