"""The site's pages: each document is in its navigation, and a person can read them all."""

import re

from environments import ROOT

from tools import make_site

#: Words of README, docs/, CONTRIBUTING, CHANGELOG and SECURITY together. A word has a letter or a digit.
MOST_WORDS = 45_000


def pages():
    return [page for page in make_site.documents() if "bench" not in page.relative_to(ROOT).parts]


def test_the_navigation_lists_each_page_once():
    wanted = [page.relative_to(ROOT).as_posix() for page in pages()]
    assert sorted(place for place in make_site.listed() if not place.startswith("reference/")) == sorted(wanted)


def test_the_reference_is_of_modules_that_exist():
    modules = [
        place.removeprefix("reference/").removesuffix(".md") for place in make_site.listed() if place.startswith("reference/")
    ]
    assert "ktmoe" in modules
    for name in modules:
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_a_person_can_read_all_pages():
    words = {page.name: sum(bool(re.search(r"\w", word)) for word in page.read_text().split()) for page in pages()}
    assert sum(words.values()) <= MOST_WORDS, words
