"""Who imports whom in the package: no circles, and nothing against the layers. The source text says it; nothing is imported."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ktmoe"
#: An import in Cython: from a.b import c, d / from a.b cimport (c, d) / import a.b / cimport a.b
_FROM = re.compile(r"^\s*from\s+([\w.]+)\s+(c?)import\s+(?:\(([^)]*)\)|([^(\n#]*))", re.MULTILINE)
_ALONE = re.compile(r"^\s*(c?)import\s+([\w., ]+)", re.MULTILINE)
_INCLUDE = re.compile(r'^\s*include "([^"]+)"', re.MULTILINE)

#: folder or module: what it must not import, folders or modules of the package. What it imports in turn does not count.
FORBIDDEN = {
    "files": {"layer", "model", "backends", "machine", "_native", "experts", "compat", "background", "weights", "conversion"},
    "conversion": {"layer", "model", "_native", "compat", "background", "cli"},
    "adapters": {"layer", "model", "backends", "_native", "compat", "background", "machine", "cli"},
    "weights": {"layer", "model", "loaders", "backends", "machine", "_native", "experts", "compat", "background"},
    "machine": {"layer", "model", "loaders", "backends", "compat", "background"},
    "background": {"layer", "model", "loaders", "backends", "compat", "_native"},
    "loaders": {"layer", "model", "backends", "machine", "compat", "_native", "quantization"},
    "quantization": {"layer", "model", "loaders", "backends", "machine", "compat", "background"},
    "backends": {"layer", "model", "loaders", "compat", "background", "quantization"},
    "_native": {"layer", "model", "loaders", "backends", "machine", "compat", "background"},
    "experts": {"layer", "model", "loaders", "backends", "machine", "compat", "background", "_native"},
    "cache": {"layer", "linear", "model", "compat", "quantization"},
    "layer": {"model", "compat", "two_stage", "distributed"},
    "distributed": {"model", "compat", "background", "cli", "training"},
    "batch": {"layer", "model", "backends", "compat"},
    "packed_weights": {"layer", "linear", "linear_group", "model", "loaders", "cache", "compat", "background"},
    "output_arrays": {"layer", "linear", "backends", "machine", "experts", "compat"},
    "training": {"compat", "background", "cli", "torch"},
    "two_stage": {"model", "loaders", "backends", "compat", "background", "cli"},
    "model": {"compat"},
    "modes": {"layer", "model", "loaders", "backends", "machine", "compat", "background", "reference"},
    "dequantization": {"backends", "_native", "layer", "model", "machine", "loaders", "quantization", "reference"},
    "reference": {"backends", "_native", "layer", "model", "machine", "loaders"},
}
#: What only these import. The tests, the benches and the examples are outside of the package.
ONLY_FOR = {
    "compat": {"compat", "sglang"},
    "sglang": {"sglang"},
    "cli": {"cli", "__main__"},
    "doctor": {"doctor", "cli"},
    "measuring": {"measuring", "cli"},
    "synthetic": {"synthetic", "cli"},
    "torch": {"torch", "transformers", "vllm"},
    "transformers": {"transformers", "cli"},
    "vllm": {"vllm"},
}


def module_of(file: Path) -> str:
    """ktmoe/machine/numa.py is ktmoe.machine.numa; ktmoe/_native/python/core.pyx becomes ktmoe._native.core."""
    names = file.relative_to(ROOT).with_suffix("").parts
    return built(".".join(names[:-1] if names[-1] == "__init__" else names))


def built(module: str) -> str:
    return module.replace("._native.python.", "._native.")


def source_files() -> dict[str, Path]:
    """module: its file. A .pxd is a module of its own, "ktmoe._native.core cimported", since it is read without its .pyx."""
    files = {module_of(file): file for pattern in ("*.py", "*.pyx") for file in PACKAGE.rglob(pattern)}
    return files | {f"{module_of(file)} cimported": file for file in PACKAGE.rglob("*.pxd")}


MODULES = source_files()


def named(base: str, name: str, end: str = "") -> str:
    """What `from base import name` imports: a module, or something within one. end: " cimported" for a cimport."""
    return f"{base}.{name}{end}" if f"{base}.{name}{end}" in MODULES else f"{base}{end}"


def imports_of_python(text: str, module: str) -> set[str]:
    """Everywhere in a file: an import within a function, or for annotations alone, only hides a circle."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: line {node.lineno}: a relative import"
            found |= {named(node.module, alias.name) for alias in node.names}
    return found


def imports_of_cython(text: str) -> set[str]:
    found = set()
    for base, c, inside, in_line in _FROM.findall(text):
        end = " cimported" if c else ""
        found |= {named(base, name.split(" as ")[0].strip(), end) for name in (inside or in_line).split(",")}
    for c, names in _ALONE.findall(text):
        found |= {name.split(" as ")[0].strip() + (" cimported" if c else "") for name in names.split(",")}
    return found


def with_included(file: Path) -> str:
    text = file.read_text()
    for name in _INCLUDE.findall(text):
        beside = file.parent / name
        text += "\n" + with_included(beside if beside.exists() else next(PACKAGE.rglob(Path(name).name)))
    return text


def packages_of(module: str) -> set[str]:
    """Those that an import of a module runs first, but for ktmoe itself: ktmoe.a and ktmoe.a.b for ktmoe.a.b.c."""
    names = module.split(".")
    return {".".join(names[:count]) for count in range(2, len(names))}


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """module: the modules of the package that it imports, and the packages that this runs; but for itself, and the packages
    that it is in, which run already."""
    graph = {}
    for module, file in MODULES.items():
        python = file.suffix == ".py"
        found = imports_of_python(file.read_text(), module) if python else imports_of_cython(with_included(file))
        found = {built(name) for name in found}
        run = set().union(*map(packages_of, found)) - packages_of(module)
        graph[module] = {name for name in found | run | {f"{module} cimported"} if name in MODULES and name != module}
    return graph


def room(module: str) -> str:
    """The folder or the module right in the package: machine for ktmoe.machine.numa."""
    return [*module.removesuffix(" cimported").split("."), "__init__"][1]


def test_the_graph_is_seen():
    """Imports of all sorts: of a module, of what is in one, of a package, within a function, by Cython."""
    graph = import_graph()
    assert "ktmoe.forks" in graph["ktmoe.registry"]
    assert "ktmoe.machine.numa" in graph["ktmoe.layer"]
    assert "ktmoe.backends" in graph["ktmoe.layer"]
    assert "ktmoe.cli.commands" in graph["ktmoe.cli"]
    assert "ktmoe.backends" in graph["ktmoe.cache.packed_file"]  # which imports ktmoe.backends.base
    assert "ktmoe.backends" not in graph["ktmoe.backends.native"]
    text = "if TYPE_CHECKING:\n    import ktmoe.layer\ndef late():\n    import ktmoe.forks\n"
    assert imports_of_python(text, "here") == {"ktmoe.layer", "ktmoe.forks"}
    text = (
        "from ktmoe import forks, errors as e  # both\nfrom ktmoe.weights import (\n    folding,\n)\nimport ktmoe.layer, re\n"
    )
    assert imports_of_cython(text) >= {"ktmoe.forks", "ktmoe.errors", "ktmoe.weights.folding", "ktmoe.layer"}
    assert imports_of_cython("cimport ktmoe.core") == {"ktmoe.core cimported"}
    core = next(module for module in graph if module.endswith(".core"))
    assert "ktmoe.errors" in graph[core]
    assert any(name.endswith(" cimported") for name in graph[core])
    assert len(graph) > 50


def test_no_circle():
    graphlib.TopologicalSorter(import_graph()).prepare()  # CycleError names one


def test_no_circle_of_rooms():
    """One that leads through several modules of a folder."""
    rooms = {room(module): set() for module in import_graph()}
    for module, others in import_graph().items():
        rooms[room(module)] |= {room(other) for other in others} - {room(module)}
    graphlib.TopologicalSorter(rooms).prepare()


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_layers(name):
    wrong = {
        f"{module} imports {other}"
        for module, others in import_graph().items()
        if room(module) == name
        for other in others
        if room(other) in FORBIDDEN[name]
    }
    assert not wrong


@pytest.mark.parametrize("name", ONLY_FOR)
def test_what_others_leave_alone(name):
    wrong = {
        f"{module} imports {other}"
        for module, others in import_graph().items()
        if room(module) not in ONLY_FOR[name]
        for other in others
        if room(other) == name
    }
    assert not wrong


def test_every_name_above_is_a_file_or_folder():
    rooms = {room(module) for module in import_graph()}
    assert FORBIDDEN.keys() <= rooms
    assert set().union(*FORBIDDEN.values()) <= rooms
    assert ONLY_FOR.keys() <= rooms
