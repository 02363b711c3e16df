"""ktmoe.transformers inside transformers: tools/test_engines.py installs both, and runs these tests beside torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

#: Whether torch and transformers are here, as they are not where `make test` runs.
PRESENT = bool(find_spec("torch") and find_spec("transformers"))
#: What needs neither.
WITHOUT = {"test_engines_tool.py"}


class Skipped(pytest.Module):
    """A module of tests that is not imported, since its imports would fail."""

    def collect(self):
        pytest.skip("torch is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if PRESENT or module_path.name in WITHOUT else Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    """Warnings of torch and transformers about each other are not ours; those of ktmoe stay errors."""
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)


@pytest.fixture(scope="session", autouse=True)
def quiet():
    """No progress bars, and no advice about tiny models."""
    if PRESENT:
        import transformers

        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The name of an architecture or of a packed format -> the folder of a small checkpoint, written once."""
    import engine_models
    import quantized_checkpoints

    folders = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("checkpoint")
            if name in quantized_checkpoints.PACKED:
                quantized_checkpoints.write(name, folders[name])
            else:
                engine_models.save(engine_models.make(name), folders[name])
        return folders[name]

    return folder
