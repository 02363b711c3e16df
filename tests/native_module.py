"""What ktmoe/_native/core has, as its Cython sources say: names and parameters. The sources are text here; nothing is built."""

from __future__ import annotations

import ast
import re

from environments import ROOT

PYTHON = ROOT / "ktmoe/_native/python"
PROBE = PYTHON / "probe"

_DEFINED = re.compile(r"^(?:def|cdef class) (\w+)", re.MULTILINE)
_ASSIGNED = re.compile(r"^([A-Za-z]\w*(?:, [A-Za-z]\w*)*) = ", re.MULTILINE)
_CLASS = re.compile(r"^cdef class (\w+)(?:\(\w+\))?:\n((?:(?: .*)?\n)*)", re.MULTILINE)
_MEMBER = re.compile(r"^    (?:def|cdef readonly [\w ]+?) (\w+)(?: *[#(].*)?$", re.MULTILINE)
_MADE = re.compile(r"def __cinit__\(self(?:, )?((?:[^()]|\(\))*)\):")


def _public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def sources(*, probe: bool) -> str:
    """Of what only tests and benches use, or of the rest."""
    files = PROBE.glob("*.pxi") if probe else [*PYTHON.glob("*.pyx"), *PYTHON.glob("*.pxi")]
    return "\n".join(file.read_text() for file in sorted(files))


def names(text: str) -> set[str]:
    """Public functions, classes and constants."""
    assigned = {name for names in _ASSIGNED.findall(text) for name in names.split(", ")}
    return _public(assigned.union(_DEFINED.findall(text)))


def members(text: str) -> dict[str, set[str]]:
    """{class: its public methods, properties and attributes}, those of private classes, too."""
    return {name: _public(_MEMBER.findall(body)) for name, body in _CLASS.findall(text)}


def constructors(text: str) -> dict[str, dict[str, object]]:
    """{class: {parameter: its default, or ... without one}}, of classes with a __cinit__."""
    found = {}
    for name, body in _CLASS.findall(text):
        if made := _MADE.search(body):
            whole = (re.sub(r"\[[^]]*\]", "", made[1]).split(",")) if made[1] else []
            pairs = [parameter.partition("=") for parameter in whole]
            found[name] = {left.split()[-1]: ast.literal_eval(right) if equal else ... for left, equal, right in pairs}
    return found
