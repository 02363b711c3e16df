"""Fixtures: the stand-in's runtime, compiled once, and its torch in place of torch."""

from __future__ import annotations

import functools
import shutil
import sys

import pytest
from environments import COMPILER

from ktmoe.compat import cuda_runtime

from . import runtime as runtimes
from .torch import Torch


@pytest.fixture(scope="session")
def fake_runtimes(tmp_path_factory):
    """Runtimes by version of CUDA, and by a function that is missing; each is compiled once."""
    if shutil.which(COMPILER[0]) is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("cuda")
    return functools.cache(lambda *which: runtimes.Runtime(runtimes.build(folder, *which)))


@pytest.fixture(scope="session")
def fake_runtime(fake_runtimes):
    return fake_runtimes()


@pytest.fixture
def fake_torch(fake_runtime, monkeypatch):
    """Imported as `torch`. A test fails if it did what CUDA forbids."""
    made = Torch(fake_runtime)
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setattr(cuda_runtime, "loaded", lambda: [str(fake_runtime.path)])
    fake_runtime.violations()
    yield made
    made.cuda.synchronize()
    assert fake_runtime.violations() == ""
