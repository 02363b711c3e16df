"""The documentation's blocks that need torch, transformers or what a server needs: each page runs as a reader would run it."""

from __future__ import annotations

import sys
from pathlib import Path

import page_runs
import page_stand_ins
import pages
import pytest

HERE = page_runs.Place(
    pages.ENGINES,
    Path(sys.executable),
    {"PYTHONPATH": str(page_runs.ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
    page_stand_ins.WRITERS,
    page_stand_ins.OF_PAGES,
)
PAGES = [page for page in pages.pages() if pages.ENGINES in pages.environments_of(pages.blocks(page))]


@pytest.mark.smoke("all")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page, tmp_path):
    assert page_runs.run(page, HERE, tmp_path)
