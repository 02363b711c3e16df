"""One word, one thing: no two classes of the package have one name. The source text says it; nothing is imported."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from environments import ROOT

#: In Cython: class A, cdef class A, cdef public class A.
_CLASS = re.compile(r"^\s*(?:cdef\s+(?:public\s+)?)?class\s+(\w+)", re.MULTILINE)


def classes_of(file: Path) -> list[tuple[str, int]]:
    """(name, line) of each, those within others too."""
    text = file.read_text()
    if file.suffix == ".py":
        return [(node.name, node.lineno) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return [(found[1], text.count("\n", 0, found.start(1)) + 1) for found in _CLASS.finditer(text)]


def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for suffix in ("py", "pyx", "pxi"):
        for file in sorted((ROOT / "ktmoe").rglob(f"*.{suffix}")):
            for name, line in classes_of(file):
                places[name].append(f"{file.relative_to(ROOT)}:{line}")
    assert {"MoELayer", "PackedLayer"} <= places.keys()  # of Python and of Cython
    twice = [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
    assert not twice, "\n".join(twice)
