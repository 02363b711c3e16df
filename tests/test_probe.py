"""The native module has what the package uses, and under python/probe/ what only tests and benches do."""

import ast

from environments import ROOT
from native_module import members, names, sources

FILES = sorted((ROOT / "ktmoe").rglob("*.py"))


def taken_of_core(text: str) -> set[str]:
    """The names of core that a file of the package uses."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "core":
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "ktmoe._native.core":
            found |= {alias.name for alias in node.names}
    return found


USED = {name for file in FILES for name in taken_of_core(file.read_text())}


def test_uses_are_seen():
    assert taken_of_core("from ktmoe._native import core\nf = lambda: core.tune(a=core.X.b)") == {"tune", "X"}
    assert taken_of_core("from ktmoe._native.core import tune as t") == {"tune"}


def test_the_package_never_names_a_probe():
    assert names(sources(probe=True)) & USED == set()


def test_what_only_tests_use_is_a_probe():
    assert names(sources(probe=False)) - USED == set()


def test_methods_that_only_tests_use_are_probes():
    trees = [ast.parse(file.read_text()) for file in FILES]
    taken = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name: own - taken for name, own in members(sources(probe=False)).items() if own - taken} == {}
