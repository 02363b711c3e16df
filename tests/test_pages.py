"""The documentation: each fence says what it is, and each block that needs no other package runs as a reader would run it."""

from __future__ import annotations

import re

import page_runs
import pages
import pytest
from environments import NEEDS_COMPILER, ROOT

#: At most so many blocks of all pages are not run.
NOT_RUN = 14
CORE_PAGES = [page for page in pages.pages() if pages.CORE in pages.environments_of(pages.blocks(page))]


@pytest.fixture(scope="session")
def core():
    """The environment of most pages."""
    return page_runs.core()


@pytest.mark.parametrize("page", pages.pages())
def test_fences(page):
    assert [fault for block in pages.blocks(page) for fault in pages.faults(block)] == []


def test_few_blocks_are_left_out():
    marked = [f"{block}: {block.reason}" for page in pages.pages() for block in pages.blocks(page) if block.reason]
    assert len(marked) <= NOT_RUN, marked


def test_a_test_that_runs_a_block_instead_names_its_page():
    marked = [block for page in pages.pages() for block in pages.blocks(page) if block.reason]
    for block in marked:
        if named := re.match(r"(tests/\S+\.py) runs it", block.reason):
            assert block.page.rpartition("/")[2] in (ROOT / named[1]).read_text(), str(block)


@NEEDS_COMPILER
@pytest.mark.parametrize("page", CORE_PAGES)
def test_a_page_runs(page, core, tmp_path):
    assert page_runs.run(page, core, tmp_path)
