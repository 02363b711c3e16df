"""The documentation's blocks that need vLLM: each page runs as a reader would run it, on a small model."""

from __future__ import annotations

import sys
from pathlib import Path

import page_runs
import pages
import pytest
import runs

PAGES = [page for page in pages.pages() if pages.VLLM in pages.environments_of(pages.blocks(page))]


@pytest.mark.smoke
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page, tmp_path):
    (tmp_path / "run").mkdir()
    variables = runs.prepared(tmp_path / "prepared")
    changed = {name: value for name, value in variables.items() if name.startswith(("PYTHONPATH", "HF_", "VLLM_", "OMP_"))}
    assert page_runs.run(page, page_runs.Place(pages.VLLM, Path(sys.executable), changed), tmp_path / "run")
