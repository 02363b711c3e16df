"""Fixtures: the stand-in's runtime, compiled once, and its torch in place of torch."""

from __future__ import annotations

import shutil
import sys

import pytest
from environments import COMPILER

from . import runtime as runtimes
from .torch import Torch


@pytest.fixture(scope="session")
def cuda_runtime(tmp_path_factory):
    if shutil.which(COMPILER[0]) is None:
        pytest.skip("there is no C compiler")
    return runtimes.Runtime(runtimes.build(tmp_path_factory.mktemp("cuda")))


@pytest.fixture
def fake_torch(cuda_runtime, monkeypatch):
    """Imported as `torch`. A test fails if it did what CUDA forbids."""
    made = Torch(cuda_runtime)
    monkeypatch.setitem(sys.modules, "torch", made)
    cuda_runtime.violations()
    yield made
    made.cuda.synchronize()
    assert cuda_runtime.violations() == ""
