"""core.pyi says of the built module what is there: names, parameters, defaults, properties; and where the probes begin."""

import ast
import inspect

import pytest
from environments import ROOT
from native_module import constructors, names, sources

from ktmoe._native import core

STUB = ROOT / "ktmoe/_native/core.pyi"
PROBES = "# Probes:"
LINES = STUB.read_text().split("\n")
BODY = ast.parse(STUB.read_text()).body


def defined(statements) -> dict[str, ast.stmt]:
    found = {}
    for node in statements:
        if isinstance(node, ast.AnnAssign):
            found[node.target.id] = node
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            assert node.name not in found
            found[node.name] = node
    return found


WRITTEN = defined(BODY)
#: Private classes are what public ones derive from.
DEFINED = {name: node for name, node in WRITTEN.items() if not name.startswith("_")}
CLASSES = {name: node for name, node in DEFINED.items() if isinstance(node, ast.ClassDef)}


def with_bases(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """The members of a class, those of its bases in this file included."""
    found = {}
    for base in map(ast.unparse, node.bases):
        if base in WRITTEN:
            found |= with_bases(WRITTEN[base])
    return found | defined(node.body)


def parameters(function: ast.FunctionDef) -> dict[str, object]:
    """{parameter: its default, or ...}, all of which have types; without self."""
    of = function.args
    assert not of.posonlyargs
    assert not of.kwonlyargs
    assert of.vararg is None
    defaults = [...] * (len(of.args) - len(of.defaults)) + [ast.literal_eval(default) for default in of.defaults]
    found = {arg.arg: default for arg, default in zip(of.args, defaults, strict=True) if arg.arg != "self"}
    typed = [arg for arg in (*of.args, of.kwarg) if arg and arg.arg != "self"]
    assert all(arg.annotation for arg in typed), f"{function.name}: a parameter has no type"
    assert function.returns, f"{function.name}: the result has no type"
    return found | ({f"**{of.kwarg.arg}": ...} if of.kwarg else {})


def built_parameters(function) -> dict[str, object]:
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        default = ... if parameter.default is parameter.empty else parameter.default
        found[f"**{name}" if parameter.kind is parameter.VAR_KEYWORD else name] = default
    found.pop("self", None)
    return found


def built_members(of: type) -> set[str]:
    """Those of its own and of private classes that it derives from."""
    return {name for base in of.__mro__[:-1] for name in vars(base) if not name.startswith("_")}


def test_the_names():
    everything = names(sources(probe=False)) | names(sources(probe=True))
    assert DEFINED.keys() == everything
    assert all(hasattr(core, name) for name in everything)
    of_core = {name for name, value in vars(core).items() if getattr(value, "__module__", "") == core.__name__}
    assert {name for name in of_core if not name.startswith("_")} <= everything


def test_the_probes_have_a_section_of_their_own():
    first = next(number for number, line in enumerate(LINES, 1) if line.startswith(PROBES))
    assert {name for name, node in DEFINED.items() if node.lineno > first} == names(sources(probe=True))


@pytest.mark.parametrize("name", [name for name, node in DEFINED.items() if isinstance(node, ast.FunctionDef)])
def test_a_function(name):
    assert parameters(DEFINED[name]) == built_parameters(getattr(core, name))


def test_constants():
    for name, node in DEFINED.items():
        if isinstance(node, ast.AnnAssign):
            assert type(getattr(core, name)).__name__ == ast.unparse(node.annotation).partition("[")[0], name


@pytest.mark.parametrize("name", CLASSES)
def test_a_class(name):
    of, said = getattr(core, name), with_bases(CLASSES[name])
    made = constructors(sources(probe=False) + sources(probe=True))
    assert parameters(said.pop("__init__")) == next(made[base.__name__] for base in of.__mro__ if base.__name__ in made)
    assert {member for member in said if not member.startswith("__")} == built_members(of)
    for member, node in said.items():
        decorators, built = [ast.unparse(decorator) for decorator in node.decorator_list], inspect.getattr_static(of, member)
        assert decorators in ([], ["property"], ["staticmethod"])
        assert (decorators == ["property"]) == inspect.isdatadescriptor(built), member
        assert (decorators == ["staticmethod"]) == isinstance(built, staticmethod), member
        if decorators == ["property"]:
            assert node.returns
        elif not member.startswith("__"):  # such as "in": its signature is Python's own
            assert parameters(node) == built_parameters(getattr(of, member)), member
