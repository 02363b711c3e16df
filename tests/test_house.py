"""The tests' own house rules: who imports whom, and that nothing outside the package reaches for what is private in it."""

import ast
import functools
from pathlib import Path

from environments import ROOT

OUTSIDE = [path for folder in ("tests", "bench", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
#: Files that may reach for anything private: they hold a lock as another thread would that a fork takes by surprise.
HOLDS_LOCKS = {"tests/test_forks.py"}
#: What the process found out or was told once, which tests set back.
SET_BACK = {"_chosen", "_refused"}
#: What kt-kernel's own torch layers ask a wrapper for, so that it is part of what ktmoe.compat promises.
OF_KT_KERNEL = {
    "_cache_depth",
    "_full_weight_grad",
    "_is_skip_lora",
    "_kt_has_cached_forward",
    "_lora_initialized",
    "_uses_authoritative_optimizer_grads",
    "_weights_loaded",
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


@functools.cache
def names_in_the_package() -> set[str]:
    """Private functions, classes, variables and attributes of ktmoe."""
    found = set()
    for path in (ROOT / "ktmoe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in found if private(name)}


def imported_from_elsewhere(tree: ast.AST) -> set[str]:
    """Names that a file imports, but not from ktmoe."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""] * len(node.names)
            )
            names = [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
            found |= {name for name, module in zip(names, modules, strict=True) if module.partition(".")[0] != "ktmoe"}
    return found


def root_of(node: ast.AST) -> str | None:
    """The name that an expression such as a.b[0].c begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def reached_for(text: str, names: set[str]) -> list[str]:
    """What a file takes of these names: by an attribute, an import, or setattr() and its like."""
    tree = ast.parse(text)
    own = {"self", "cls", *imported_from_elsewhere(tree)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and root_of(node.value) not in own:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "ktmoe":
            found += [f"{node.module}.{alias.name}" for alias in node.names if private(alias.name) and alias.name != "_native"]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "getattr", "delattr"):
            named = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
            if root_of(node.args[0]) not in own:
                found += [ast.unparse(node.args[0]) + "." + name for name in named if str(name).rpartition(".")[2] in names]
    return [name for name in found if name.rpartition(".")[2] not in SET_BACK | OF_KT_KERNEL]


def test_nothing_reaches_for_what_is_private():
    found = {str(path.relative_to(ROOT)): reached_for(path.read_text(), names_in_the_package()) for path in OUTSIDE}
    assert {name: what for name, what in found.items() if what and name not in HOLDS_LOCKS} == {}


def test_what_reaches_for_something_private_is_seen():
    names = {"_read", "_packed", "_load"}
    for line in (
        "layer._packed.close()",
        "models[0].layers['x']._read = None",
        "from ktmoe.demo import _load",
        "from ktmoe import demo\ndemo._load()",
        "monkeypatch.setattr(layer, '_read', None)",
        "monkeypatch.setattr('ktmoe.demo._load', None)",
        "make()._packed",
    ):
        assert len(reached_for(line, names)) == 1, line
    allowed = ("self._packed = 1", "import other\nother._load()", "layer.packed", "layer._unknown", "from ktmoe import _native")
    for line in allowed:
        assert reached_for(line, names) == [], line


def test_the_allowances_are_needed():
    assert names_in_the_package() >= SET_BACK
    for name in HOLDS_LOCKS:
        assert reached_for((ROOT / name).read_text(), names_in_the_package())


def imported(text: str) -> set[str]:
    """The modules that a file imports, at its top or within."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_test_module_imports_another():
    """What two need is in a module without tests; fixtures are in conftest.py or in a module that it names as a plugin."""
    wrong = {}
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        modules = {name for name in imported(path.read_text()) if any(part.startswith("test_") for part in name.split("."))}
        if modules:
            wrong[path.name] = modules
    assert not wrong


def test_an_import_of_a_test_module_is_seen():
    assert "test_exact" in imported("def f():\n    from test_exact import forward")
    assert "tests.test_exact" in imported("from tests import test_exact")
    assert "test_exact" in imported("import test_exact as exact")
